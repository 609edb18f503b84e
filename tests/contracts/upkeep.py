"""What looking after a database must do on every kind of it; a part of the store's contract."""

from __future__ import annotations

from typing import Any

import pytest
from contracts.records import make_samples, make_scenario, make_trial

from tuning_db import Store, upkeep
from tuning_db.timelines import pack


def hundred(store: Store) -> str:
    """Search and confirming trials, old and new, with samples; the scenario's key."""
    key = store.ensure(make_scenario())
    for number in range(100):
        stage = "confirm" if number % 4 == 0 else "search"
        trial = make_trial(key, stage=stage, block=number, ended_at=float(number))
        store.add(trial, make_samples(trial.id, 2))
    return key


class UpkeepContract:
    """Inherited through `StoreContract`."""

    def test_a_good_database_has_no_problems(self, address: Any, store: Store) -> None:
        hundred(store)
        for quick in (False, True):
            health = upkeep.check(address, quick)
            assert health.problems == ()
            assert health.counts == {"hardware": 1, "scenarios": 1, "trials": 100, "samples": 100, "claims": 0}

    @pytest.mark.parametrize(
        ("statement", "says"),
        [
            ("UPDATE hardware SET kind = 'gpu'", "hardware h1:"),
            ("UPDATE scenarios SET engine = 'other'", "scenario s1:"),
            ("UPDATE samples SET count = 7 WHERE trial_id = (SELECT min(trial_id) FROM samples)", "says 7"),
        ],
    )
    def test_a_row_that_is_not_what_it_says_is_reported(
        self, address: Any, store: Store, statement: str, says: str
    ) -> None:
        hundred(store)
        with store.engine.begin() as connection:
            connection.exec_driver_sql(statement)
        assert any(says in problem for problem in upkeep.check(address).problems)

    def test_damaged_samples_are_reported_by_trial(self, address: Any, store: Store) -> None:
        from tuning_db.schema import samples

        key = store.ensure(make_scenario())
        trial = make_trial(key)
        store.add(trial, make_samples(trial.id))
        with store.unit(write=True) as connection:
            connection.execute(samples.update().values(blob=pack(make_samples(trial.id))[:-9]))
        assert upkeep.check(address, quick=True).problems == ()
        (problem,) = upkeep.check(address).problems
        assert trial.id in problem and "damaged" in problem

    @pytest.mark.parametrize("whole", [False, True])
    def test_pruning_keeps_all_evidence_and_all_that_is_new(self, address: Any, store: Store, whole: bool) -> None:
        key = hundred(store)
        before = store.trials()
        asked = upkeep.prune(address, before=50.0, whole=whole, dry_run=True)
        assert store.trials() == before and all(store.samples(trial.id) for trial in before)
        assert upkeep.prune(address, before=50.0, whole=whole) == asked
        old = [trial for trial in before if trial.stage == "search" and trial.ended_at < 50]
        assert (asked.samples, asked.trials) == (len(old), len(old) if whole else 0)
        gone = {trial.id for trial in old}
        assert store.trials() == [trial for trial in before if not whole or trial.id not in gone]
        assert all(bool(store.samples(trial.id)) == (trial.id not in gone) for trial in before)
        assert store.scenario(key)
        assert upkeep.check(address).problems == ()

    def test_vacuuming_changes_no_row(self, address: Any, store: Store) -> None:
        hundred(store)
        before = store.trials()
        sizes = upkeep.vacuum(address)
        assert all(size > 0 for size in sizes)
        assert store.trials() == before and upkeep.check(address).problems == ()

    def test_the_newest_schema_needs_no_upgrade(self, address: Any, store: Store) -> None:
        before, after = upkeep.upgrade(address)
        assert before == after
