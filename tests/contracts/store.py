"""What every tuning database must do. A subclass supplies ``address``, the place of one that is not there yet."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
from contracts.claims import ClaimsContract
from contracts.records import HOSTILE, make_samples, make_scenario, make_trial
from contracts.upkeep import UpkeepContract
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning_db import (
    Ambiguous,
    BadValue,
    DuplicateTrial,
    NotFound,
    Reference,
    Store,
    StoreError,
    new_id,
    open_store,
)


class StoreContract(ClaimsContract, UpkeepContract):
    """Inherited by one test class per database."""

    @pytest.fixture
    def address(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def store(self, address):
        with open_store(address) as store:
            yield store

    def test_a_scenario_is_recorded_once_and_comes_back_whole(self, store: Store) -> None:
        scenario = make_scenario(workload={"name": HOSTILE, "rates": [1, 2.5, None], "deep": {"a": True}})
        assert store.ensure(scenario) == store.ensure(scenario) == scenario.key
        assert store.scenarios() == [scenario]
        assert store.scenario(scenario.key).key == scenario.key
        with pytest.raises(NotFound):
            store.scenario("s1:none")

    def test_a_trial_comes_back_as_it_went_in(self, store: Store) -> None:
        trial = make_trial(store.ensure(make_scenario()), reason=HOSTILE, config={"name": HOSTILE, "n": 3})
        samples = make_samples(trial.id)
        store.add(trial, samples)
        assert store.trials() == [trial]
        assert store.trial(trial.id) == trial
        assert store.samples(trial.id) == samples

    def test_a_reopened_database_has_everything(self, address, store: Store) -> None:
        trial = make_trial(store.ensure(make_scenario()))
        store.add(trial, make_samples(trial.id))
        store.close()
        with open_store(address) as again, open_store(address, readonly=True) as reader:
            assert again.trials() == reader.trials() == [trial]
            assert again.samples(trial.id) == make_samples(trial.id)

    def test_a_trial_without_samples_has_none(self, store: Store) -> None:
        trial = make_trial(store.ensure(make_scenario()))
        store.add(trial)
        assert store.samples(trial.id) == []

    def test_trials_are_filtered_and_in_order_of_time(self, store: Store) -> None:
        first = store.ensure(make_scenario())
        second = store.ensure(make_scenario(engine="other"))
        rows = [
            make_trial(first),
            make_trial(second),
            make_trial(first, stage="confirm", block=2),
            make_trial(first, status="oom"),
        ]
        for row in reversed(rows):
            store.add(row)
        assert store.trials() == rows
        assert store.trials(first) == [rows[0], rows[2], rows[3]]
        assert store.trials(first, stage="search") == [rows[0], rows[3]]
        assert store.trials(status="oom") == [rows[3]]
        assert store.trials(config_key=rows[2].config_key) == [rows[2]]

    def test_a_configuration_has_one_counted_search_trial(self, store: Store) -> None:
        key, other = store.ensure(make_scenario()), store.ensure(make_scenario(engine="other"))
        trial = make_trial(key)
        store.add(trial)
        with pytest.raises(DuplicateTrial, match=trial.config_key):
            store.add(replace(trial, id=new_id()))
        store.add(replace(trial, id=new_id(), counted=False, status="busy"))
        store.add(replace(trial, id=new_id(), stage="confirm", block=1))
        store.add(replace(trial, id=new_id(), stage="confirm", block=2))
        store.add(replace(trial, id=new_id(), scenario_key=other))
        assert len(store.trials()) == 5

    def test_an_id_is_taken_once(self, store: Store) -> None:
        trial = make_trial(store.ensure(make_scenario()))
        store.add(trial)
        with pytest.raises(DuplicateTrial, match="stored already"):
            store.add(replace(trial, config_key="c1:new"))

    def test_a_refused_trial_leaves_nothing_and_the_next_one_works(self, store: Store) -> None:
        key = store.ensure(make_scenario())
        trial = make_trial(key)
        with pytest.raises(NotFound, match="ensure"):
            store.add(replace(trial, scenario_key="s1:none"))
        with pytest.raises(BadValue, match=r"metrics\.ttft_p99"):
            store.add(replace(trial, metrics={"ttft_p99": float("nan")}))
        with pytest.raises(BadValue, match="belongs to trial"):
            store.add(trial, make_samples("feedbeef"))
        assert store.trials() == []
        store.add(trial, make_samples(trial.id))
        assert store.trials() == [trial]

    @pytest.mark.parametrize(
        "change",
        [
            {"id": "no-hex"},
            {"id": "ABCDEF0123"},
            {"metrics": {"x": float("inf")}},
            {"metrics": {"x": None}},
            {"metrics": {"x": 10**400}},
            {"seconds": {"launch": float("-inf")}},
            {"ended_at": float("nan")},
            {"seed": 1 << 63},
            {"config": {"x": object()}},
            {"config": {"x": "a\x00b"}},
            {"config": {"x": "\ud800"}},
            {"status": "o\x00k"},
            {"config": {1: "x"}},
            {"config_key": "x" * 81},
            {"stage": "x" * 5000},
        ],
    )
    def test_what_cannot_be_stored_is_refused_with_its_name(self, store: Store, change: dict[str, Any]) -> None:
        with pytest.raises(BadValue, match=next(iter(change))):
            store.add(make_trial(store.ensure(make_scenario()), **change))
        assert store.trials() == []

    def test_a_broken_log_text_never_costs_the_trial(self, store: Store) -> None:
        trial = make_trial(store.ensure(make_scenario()), reason="dies \x00 \udcff", effective={"a\x00": ["\ud800"]})
        store.add(trial)
        back = store.trial(trial.id)
        assert back.reason == "dies � �"
        assert back.effective == {"a�": ["�"]}

    def test_a_trial_is_found_by_the_beginning_of_its_id(self, store: Store) -> None:
        key = store.ensure(make_scenario())
        rows = [make_trial(key, id=ident) for ident in ("aaaa0001", "aaaa0002", "bbbb0001")]
        for row in rows:
            store.add(row)
        assert store.trial("b") == rows[2]
        assert store.trial("aaaa0001") == rows[0]
        with pytest.raises(Ambiguous, match="aaaa0001, aaaa0002"):
            store.trial("aaaa")
        for wrong in ("c", "", "aaaa%", "_", "A", "aaaa0001 "):
            with pytest.raises(NotFound):
                store.trial(wrong)

    def test_references_are_kept_by_key_and_the_first_one_stays(self, store: Store) -> None:
        reference = Reference("r1:x", "quality", {"bits": [4, 8]}, bytes(range(256)) * 10)
        assert store.reference("r1:x") is None
        store.put_reference(reference)
        store.put_reference(replace(reference, blob=b"other"))
        assert store.reference("r1:x") == reference

    def test_threads_share_one_store(self, store: Store) -> None:
        key = store.ensure(make_scenario())
        errors: list[BaseException] = []

        def write() -> None:
            try:
                for _ in range(10):
                    store.add(make_trial(key))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=write) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert len(store.trials(key)) == 40

    def test_a_reader_that_holds_a_transaction_blocks_no_writer(self, address, store: Store) -> None:
        key = store.ensure(make_scenario())
        store.add(make_trial(key))
        with open_store(address) as reader, reader.engine.connect() as held:
            count = "SELECT count(*) FROM trials"
            assert held.exec_driver_sql(count).scalar() == 1
            store.add(make_trial(key))
            assert len(store.trials()) == 2
        assert len(store.trials()) == 2

    def test_a_readonly_store_refuses_to_write(self, address, store: Store) -> None:
        key = store.ensure(make_scenario())
        with open_store(address, readonly=True) as reader, pytest.raises(StoreError):
            reader.add(make_trial(key))
        assert store.trials() == []

    def test_a_missing_database_is_not_created_by_a_reader(self, address) -> None:
        with pytest.raises(StoreError, match="autotune search"):
            open_store(address, readonly=True)

    def test_any_text_is_stored_and_found(self, store: Store) -> None:
        texts = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=40)

        @settings(max_examples=25, deadline=None)
        @given(text=texts)
        def holds(text: str) -> None:
            key = store.ensure(make_scenario(engine=text, model={"name": text, text: text}))
            trial = make_trial(key, config={text: text}, config_key=text, reason=text, stage=text, status=text)
            store.add(trial)
            assert trial in store.trials(key, stage=text, status=text, config_key=text)
            assert store.trial(trial.id) == trial
            assert store.scenario(key).engine == text

        holds()
