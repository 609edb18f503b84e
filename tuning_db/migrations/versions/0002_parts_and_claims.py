"""Adds the keys of a scenario's parts, claims, and an index of failures. Never edited once released."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from tuning_db.canonical import digest

revision = "0002"
down_revision = "0001"

PARTS = ("engine_key", "model_key", "workload_key", "subject_key")


def upgrade() -> None:
    """Add the columns, fill them for the scenarios that are there, and create ``claims``."""
    key = sa.String(80).with_variant(sa.String(80, collation="C"), "postgresql")
    for name in PARTS:
        op.add_column("scenarios", sa.Column(name, key, nullable=False, server_default=""))
    _fill()
    parts = ["subject_key", "hardware_key", "engine_key", "model_key", "workload_key", "created_at", "key"]
    op.create_index("ix_scenarios_parts", "scenarios", parts)
    op.create_index("ix_trials_status_ended_at", "trials", ["status", "ended_at"])
    op.create_table(
        "claims",
        sa.Column("scenario_key", key, nullable=False),
        sa.Column("slot", key, nullable=False),
        sa.Column("token", key, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("leased_until", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("scenario_key", "slot", name="pk_claims"),
        sa.ForeignKeyConstraint(
            ["scenario_key"], ["scenarios.key"], name="fk_claims_scenario_key_scenarios", ondelete="CASCADE"
        ),
    )


def _fill() -> None:
    json = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")
    known: list[sa.ColumnClause[Any]] = [sa.column("key", sa.Text), sa.column("engine", sa.Text)]
    known += [sa.column(name, json) for name in ("engine_build", "model", "workload")]
    scenarios = sa.table("scenarios", *known, *(sa.column(name, sa.Text) for name in PARTS))
    connection = op.get_bind()
    for row in connection.execute(sa.select(*known).select_from(scenarios)).all():
        parts = {
            "engine_key": digest("e1", {"engine": row.engine, "build": row.engine_build}),
            "model_key": digest("md1", row.model),
            "workload_key": digest("w1", row.workload),
            "subject_key": digest("u1", {"engine": row.engine, "model": row.model.get("name")}),
        }
        connection.execute(scenarios.update().where(scenarios.c.key == row.key).values(parts))
