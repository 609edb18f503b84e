"""Every released schema is brought to the newest one, with a copy of what it was, and no row changes."""

from __future__ import annotations

import sqlite3
import stat
from pathlib import Path

import pytest
from sqlalchemy import inspect

from tuning_db import StoreError, StoreWarning, open_store
from tuning_db.schema import SCHEMA_VERSION, metadata

DUMPS = sorted((Path(__file__).parents[1] / "golden" / "schema").glob("*.sql"))


def restore(dump: Path, path: Path) -> Path:
    """The database of a golden dump."""
    with sqlite3.connect(path) as connection:
        connection.executescript(dump.read_text(encoding="utf-8"))
    connection.close()
    return path


def contents(path: Path) -> dict[str, list[dict[str, object]]]:
    """Every row of every table of ours."""
    with sqlite3.connect(path) as connection:
        connection.row_factory = sqlite3.Row
        names = [row["name"] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        tables = {name: [dict(row) for row in connection.execute(f'SELECT * FROM "{name}"')] for name in names}
    connection.close()
    return {name: rows for name, rows in tables.items() if name not in ("alembic_version", "meta")}


def test_every_released_schema_has_its_dump():
    wanted = [str(version) for version in range(1, SCHEMA_VERSION)]
    assert [dump.stem for dump in DUMPS] == wanted, "make the dump of the old version with scripts/dump_schema.py"


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("dump", DUMPS, ids=lambda dump: dump.stem)
def test_an_old_file_is_copied_and_brought_up_to_date(tmp_path, dump, readonly):
    path = restore(dump, tmp_path / "tuning.db")
    before = contents(path)
    with pytest.warns(StoreWarning, match=f"had schema {dump.stem}"), open_store(path, readonly=readonly) as store:
        with store.engine.connect() as connection:
            tables = inspect(connection)
            for table in metadata.sorted_tables:
                assert {c["name"] for c in tables.get_columns(table.name)} == set(table.columns.keys())
                assert {i["name"] for i in tables.get_indexes(table.name)} >= {i.name for i in table.indexes}
        scenarios = store.scenarios()
        assert [s.key for s in scenarios] == [row["key"] for row in before["scenarios"]]
        assert len(store.trials()) == len(before["trials"])
    after = contents(path)
    for name, rows in before.items():
        assert [{k: row[k] for k in old} for row, old in zip(after[name], rows, strict=True)] == rows
    for row, scenario in zip(after["scenarios"], scenarios, strict=True):
        names = ("engine_key", "model_key", "workload_key", "subject_key")
        assert [row[name] for name in names] == [getattr(scenario, name) for name in names]
    (copy,) = tmp_path.glob(f"tuning.db.schema{dump.stem}-*")
    assert contents(copy) == before
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    open_store(path, readonly=readonly).close()
    assert len(list(tmp_path.glob("tuning.db.schema*"))) == 1


def test_a_migration_cut_short_leaves_the_old_schema(tmp_path, monkeypatch):
    path = restore(DUMPS[0], tmp_path / "tuning.db")
    before = contents(path)
    monkeypatch.setattr("tuning_db.migrate._mark", lambda connection: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.warns(StoreWarning), pytest.raises(KeyboardInterrupt):
        open_store(path)
    assert contents(path) == before
    monkeypatch.undo()
    with pytest.warns(StoreWarning), open_store(path) as store:
        assert len(store.trials()) == len(before["trials"])


def test_an_old_file_that_cannot_be_written_says_what_to_do(tmp_path, monkeypatch):
    path = restore(DUMPS[0], tmp_path / "tuning.db")
    before = path.read_bytes()

    def refuse(*args, **more):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tuning_db.sqlite_file.os.open", refuse)
    with pytest.raises(StoreError, match=r"has schema 1, this tool reads 2.*copy it.*--db"):
        open_store(path, readonly=True)
    assert path.read_bytes() == before
