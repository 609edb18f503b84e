"""The migrations build what the tables say, and the indexes are used."""

from __future__ import annotations

import sqlite3

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, inspect

import tuning_db.migrate
from tuning_db import open_store
from tuning_db.schema import metadata


def _statements(path):
    with sqlite3.connect(path) as connection:
        rows = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    # An added column stands at the end of the last line, so lines do not tell.
    return {name: sorted(part.strip(" \t\n()") for part in sql.split(",")) for name, sql in rows}


def test_the_migrations_build_exactly_the_tables(tmp_path):
    open_store(tmp_path / "migrated.db").close()
    engine = create_engine(f"sqlite:///{tmp_path / 'created.db'}")
    metadata.create_all(engine)
    engine.dispose()
    migrated = _statements(tmp_path / "migrated.db")
    assert migrated.pop("alembic_version")
    assert migrated == _statements(tmp_path / "created.db")


def test_alembic_sees_no_difference(tmp_path):
    with open_store(tmp_path / "tuning.db") as store, store.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
        assert inspect(connection).has_table("alembic_version")


def test_the_history_is_one_line():
    from pathlib import Path

    script = ScriptDirectory(str(Path(tuning_db.migrate.__file__).parent / "migrations"))
    assert len(script.get_heads()) == len(script.get_bases()) == 1


@pytest.mark.parametrize(
    ("query", "index"),
    [
        (
            "SELECT * FROM trials WHERE scenario_key = 'a' AND stage = 'b' ORDER BY id",
            "ix_trials_scenario_key_stage_id",
        ),
        ("SELECT * FROM trials WHERE config_key = 'a'", "ix_trials_config_key"),
        ("SELECT * FROM trials WHERE ended_at > 5", "ix_trials_ended_at"),
        ("SELECT * FROM trials WHERE id >= 'a' AND id < 'ag' ORDER BY id", "sqlite_autoindex_trials_1"),
        ("SELECT * FROM scenarios WHERE hardware_key = 'a'", "ix_scenarios_hardware_key"),
        ("SELECT * FROM hardware WHERE loose = 'a'", "ix_hardware_loose"),
        (
            "SELECT key, created_at, hardware_key FROM scenarios WHERE subject_key = 'a'",
            "COVERING INDEX ix_scenarios_parts",
        ),
        ("SELECT * FROM scenarios WHERE measured_key = 'a'", "ix_scenarios_measured_key"),
        ("SELECT * FROM trials WHERE status = 'oom' ORDER BY ended_at DESC LIMIT 20", "ix_trials_status_ended_at"),
        ("SELECT * FROM trials WHERE status = 'oom' AND ended_at > 5", "ix_trials_status_ended_at"),
        ("SELECT * FROM claims WHERE scenario_key = 'a'", "sqlite_autoindex_claims_1"),
    ],
)
def test_common_questions_use_an_index(tmp_path, query, index):
    with open_store(tmp_path / "tuning.db") as store, store.engine.connect() as connection:
        plan = " ".join(row.detail for row in connection.exec_driver_sql("EXPLAIN QUERY PLAN " + query))
    assert index in plan
    assert "TEMP B-TREE" not in plan
