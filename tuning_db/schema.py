"""The tables, as SQLAlchemy Core. The one Alembic revision per schema version mirrors them; a test compares the two."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    and_,
)
from sqlalchemy.dialects.postgresql import JSONB

SCHEMA_VERSION = 2
"""Counts released schemas; kept in the file so that an older tool can say that a file is too new for it."""

APPLICATION_ID = 0x61747564
"""``atud`` in the header of an SQLite file: marks it as ours."""


def tool_version() -> str:
    """The version of the installed distribution, or ``unknown``."""
    try:
        return version("autotune")
    except PackageNotFoundError:
        return "unknown"


metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

Json = JSON().with_variant(JSONB(), "postgresql")
# Keys are compared and sorted by code point on both databases, whatever the server's locale.
Key = String(80).with_variant(String(80, collation="C"), "postgresql")

meta = Table(
    "meta",
    metadata,
    Column("name", Key, primary_key=True),
    Column("value", Text, nullable=False),
)

hardware = Table(
    "hardware",
    metadata,
    Column("key", Key, primary_key=True),
    Column("loose", Key, nullable=False, index=True),
    Column("kind", Text, nullable=False),
    Column("label", Text, nullable=False),
    Column("host", Text, nullable=False),
    Column("facts", Json, nullable=False),
)

scenarios = Table(
    "scenarios",
    metadata,
    Column("key", Key, primary_key=True),
    Column("measured_key", Key, nullable=False, index=True),
    Column("hardware_key", Key, ForeignKey("hardware.key"), nullable=False, index=True),
    Column("engine", Text, nullable=False),
    Column("engine_build", Json, nullable=False),
    Column("model", Json, nullable=False),
    Column("workload", Json, nullable=False),
    Column("objective", Json, nullable=False),
    Column("created_at", Double, nullable=False),
    # The defaults are what SQLite needs to add a column to rows that are there.
    Column("engine_key", Key, nullable=False, server_default=""),
    Column("model_key", Key, nullable=False, server_default=""),
    Column("workload_key", Key, nullable=False, server_default=""),
    Column("subject_key", Key, nullable=False, server_default=""),
)
# All that ranking the scenarios of one engine and model needs, so that it reads no row.
_parts = [scenarios.c[name] for name in ("subject_key", "hardware_key", "engine_key", "model_key", "workload_key")]
Index("ix_scenarios_parts", *_parts, scenarios.c.created_at, scenarios.c.key)

trials = Table(
    "trials",
    metadata,
    Column("id", Key, primary_key=True),
    Column("scenario_key", Key, ForeignKey("scenarios.key"), nullable=False),
    Column("stage", Text, nullable=False),
    Column("config", Json, nullable=False),
    Column("config_key", Key, nullable=False, index=True),
    Column("status", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("metrics", Json, nullable=False),
    Column("seconds", Json, nullable=False),
    Column("effective", Json, nullable=False),
    Column("counters", Json, nullable=False),
    Column("block", Integer, nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("started_at", Double, nullable=False),
    Column("ended_at", Double, nullable=False, index=True),
    Column("provenance", Json, nullable=False),
    Column("counted", Boolean, nullable=False),
)
Index(None, trials.c.scenario_key, trials.c.stage, trials.c.id)
Index("ix_trials_status_ended_at", trials.c.status, trials.c.ended_at)
_once = and_(trials.c.stage == "search", trials.c.counted)
Index(
    "uq_trials_counted_search",
    trials.c.scenario_key,
    trials.c.config_key,
    unique=True,
    sqlite_where=_once,
    postgresql_where=_once,
)

claims = Table(
    "claims",
    metadata,
    Column("scenario_key", Key, ForeignKey("scenarios.key", ondelete="CASCADE"), primary_key=True),
    Column("slot", Key, primary_key=True),
    Column("token", Key, nullable=False),
    Column("owner", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("leased_until", Double, nullable=False),
)

samples = Table(
    "samples",
    metadata,
    Column("trial_id", Key, ForeignKey("trials.id", ondelete="CASCADE"), primary_key=True),
    Column("count", Integer, nullable=False),
    Column("blob", LargeBinary, nullable=False),
)

reference_blobs = Table(
    "reference_blobs",
    metadata,
    Column("key", Key, primary_key=True),
    Column("kind", Text, nullable=False, index=True),
    Column("facts", Json, nullable=False),
    Column("blob", LargeBinary, nullable=False),
    Column("created_at", Double, nullable=False),
)
