"""The first schema. Never edited once released: a change is a new revision."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create every table of schema version 1."""
    json = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
    key = sa.String(80).with_variant(sa.String(80, collation="C"), "postgresql")
    op.create_table(
        "meta",
        sa.Column("name", key, nullable=False),
        sa.Column("value", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_meta"),
    )
    _scenarios(json, key)
    _trials(json, key)
    op.create_table(
        "samples",
        sa.Column("trial_id", key, nullable=False),
        sa.Column("count", sa.Integer, nullable=False),
        sa.Column("blob", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("trial_id", name="pk_samples"),
        sa.ForeignKeyConstraint(["trial_id"], ["trials.id"], name="fk_samples_trial_id_trials", ondelete="CASCADE"),
    )
    op.create_table(
        "reference_blobs",
        sa.Column("key", key, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("facts", json, nullable=False),
        sa.Column("blob", sa.LargeBinary, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_reference_blobs"),
    )
    op.create_index("ix_reference_blobs_kind", "reference_blobs", ["kind"])


def _scenarios(json: sa.types.TypeEngine[Any], key: sa.types.TypeEngine[str]) -> None:
    op.create_table(
        "hardware",
        sa.Column("key", key, nullable=False),
        sa.Column("loose", key, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("label", sa.Text, nullable=False),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("facts", json, nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_hardware"),
    )
    op.create_index("ix_hardware_loose", "hardware", ["loose"])
    op.create_table(
        "scenarios",
        sa.Column("key", key, nullable=False),
        sa.Column("measured_key", key, nullable=False),
        sa.Column("hardware_key", key, nullable=False),
        sa.Column("engine", sa.Text, nullable=False),
        sa.Column("engine_build", json, nullable=False),
        sa.Column("model", json, nullable=False),
        sa.Column("workload", json, nullable=False),
        sa.Column("objective", json, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_scenarios"),
        sa.ForeignKeyConstraint(["hardware_key"], ["hardware.key"], name="fk_scenarios_hardware_key_hardware"),
    )
    op.create_index("ix_scenarios_measured_key", "scenarios", ["measured_key"])
    op.create_index("ix_scenarios_hardware_key", "scenarios", ["hardware_key"])


def _trials(json: sa.types.TypeEngine[Any], key: sa.types.TypeEngine[str]) -> None:
    op.create_table(
        "trials",
        sa.Column("id", key, nullable=False),
        sa.Column("scenario_key", key, nullable=False),
        sa.Column("stage", sa.Text, nullable=False),
        sa.Column("config", json, nullable=False),
        sa.Column("config_key", key, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("metrics", json, nullable=False),
        sa.Column("seconds", json, nullable=False),
        sa.Column("effective", json, nullable=False),
        sa.Column("counters", json, nullable=False),
        sa.Column("block", sa.Integer, nullable=False),
        sa.Column("seed", sa.BigInteger, nullable=False),
        sa.Column("started_at", sa.Double, nullable=False),
        sa.Column("ended_at", sa.Double, nullable=False),
        sa.Column("provenance", json, nullable=False),
        sa.Column("counted", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_trials"),
        sa.ForeignKeyConstraint(["scenario_key"], ["scenarios.key"], name="fk_trials_scenario_key_scenarios"),
    )
    op.create_index("ix_trials_config_key", "trials", ["config_key"])
    op.create_index("ix_trials_ended_at", "trials", ["ended_at"])
    op.create_index("ix_trials_scenario_key_stage_id", "trials", ["scenario_key", "stage", "id"])
    once = sa.and_(sa.column("stage") == sa.literal("search"), sa.column("counted", sa.Boolean))
    op.create_index(
        "uq_trials_counted_search",
        "trials",
        ["scenario_key", "config_key"],
        unique=True,
        sqlite_where=once,
        postgresql_where=once,
    )
