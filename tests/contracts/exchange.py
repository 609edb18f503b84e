"""What export, import and merge must do on every database. A subclass supplies ``new``, which makes an empty one."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from contracts.records import HOSTILE, make_samples, make_scenario, make_trial
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuning_db import BadValue, Hardware, Reference, Refused, Store, StoreError, open_store
from tuning_db.exchange import exported, merge, read_lines, take
from tuning_db.exchange_lines import Writer

New = Callable[[], Store]


def whole(store: Store) -> bytes:
    """The export of a database."""
    return b"".join(exported(store))


def resealed(lines: list[bytes]) -> list[bytes]:
    """An export with a last line that fits its records, as somebody who means harm would write it."""
    writer = Writer("1.0")
    sealed = [writer.head()]
    for line in lines:
        ((kind, values),) = json.loads(line).items()
        if kind in writer.counts:
            sealed.append(writer.record(kind, values))
    return [*sealed, writer.end()]


def fill(store: Store, machine: int, runs: list[tuple[int, int, bool]]) -> None:
    """One machine's work: a scenario that all machines share and one of its own, and runs of (configuration, ...)."""
    shared = make_scenario(hardware=Hardware("gpu", {"product": "A100", "count": 1}, host=f"{machine:016x}"))
    own = make_scenario(hardware=Hardware("gpu", {"product": "A100", "driver": None}, host=f"{machine:016x}"))
    keys = [store.ensure(shared), store.ensure(own)]
    seen: set[tuple[int, int]] = set()
    for step, (where, config, searched) in enumerate(runs):
        ident = f"{step:06x}{machine:02x}"
        counted = searched and (where, config) not in seen
        seen |= {(where, config)} if counted else set()
        store.add(
            make_trial(keys[where], id=ident, config={"x": config}, config_key=f"c1:{config}", counted=counted,
                       provenance={"host": f"{machine:016x}", "autotune": "1.0"}),
            make_samples(ident) if step % 2 else (),
        )  # fmt: skip
    store.put_reference(Reference("r1:same", "quality", {"a": 1}, bytes(range(256))))
    store.put_reference(Reference(f"r1:{machine}", "quality", {"a": machine}, b"x"))


class ExchangeContract:
    """Inherited by one test class per database."""

    @pytest.fixture
    def new(self) -> New:
        raise NotImplementedError

    runs = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.booleans()), max_size=8)
    examples = 4

    def test_merging_in_any_order_and_again_gives_the_same_bytes(self, new: New) -> None:
        @settings(max_examples=self.examples, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.lists(self.runs, min_size=2, max_size=3), st.randoms(use_true_random=False))
        def holds(machines: list[list[tuple[int, int, bool]]], dice: Any) -> None:
            stores = [new() for _ in machines]
            for number, (store, runs) in enumerate(zip(stores, machines, strict=True)):
                fill(store, number, runs)
            merged = []
            for order in list(itertools.permutations(stores))[:2] + list(itertools.permutations(stores))[-1:]:
                target = new()
                again = [*order, *order, target]
                dice.shuffle(again)
                for store in [*order, *again]:
                    merge(target, store)
                merged.append(target)
            merge(stores[0], merged[-1])  # into one of them, and by way of another merged database
            assert len({whole(store) for store in [*merged, stores[0]]}) == 1
            assert len(merged[0].trials()) == sum(map(len, machines))
            for store in (*stores, *merged):
                store.close()

        holds()

    def test_one_counted_search_trial_of_a_configuration_stays_the_oldest(self, new: New) -> None:
        one, two = new(), new()
        fill(one, 1, [(0, 0, True)])
        fill(two, 2, [(0, 1, True), (0, 0, True)])
        merge(two, one)
        assert [(trial.id, trial.counted) for trial in two.trials()] == [
            ("00000001", True), ("00000002", True), ("00000102", False)
        ]  # fmt: skip
        assert [trial.provenance["host"][-1] for trial in two.trials()] == ["1", "2", "2"]

    def test_a_merged_database_answers_for_the_fleet(self, new: New) -> None:
        fleet, node = new(), new()
        scenario = make_scenario()
        key = node.ensure(scenario)
        for block in (1, 2, 3):
            about = {"round": "r", "default": "c1:a"}
            for config in ("c1:a", "c1:b"):
                node.add(make_trial(key, stage="confirm", block=block, config_key=config, provenance=about))
        merge(fleet, node)
        found = fleet.best(scenario, lambda metrics: metrics["tokens_per_s"])
        assert found is not None
        assert found == node.best(scenario, lambda metrics: metrics["tokens_per_s"])

    def test_an_export_comes_back_whole_with_samples_and_hostile_text(self, new: New) -> None:
        one, two = new(), new()
        key = one.ensure(make_scenario(workload={"name": HOSTILE, "deep": {"rates": [1, 2.5, None]}}))
        trial = make_trial(key, config={HOSTILE: HOSTILE}, reason="x" * 10_000_000, effective={"n": -0.0, "e": 1e-300})
        one.add(trial, make_samples(trial.id))
        lines = read_lines(io.BytesIO(whole(one)))
        taken = take(two, lines, "file")
        assert (taken.trials, taken.new_trials, taken.scenarios, taken.new_scenarios) == (1, 1, 1, 1)
        assert two.trials() == [trial]
        assert two.scenarios() == one.scenarios()
        assert two.samples(trial.id) == one.samples(trial.id)
        assert whole(two) == whole(one)
        assert take(two, [*exported(one)], "file").new_trials == 0

    def test_an_export_without_samples_can_be_completed_later(self, new: New) -> None:
        one, two = new(), new()
        fill(one, 1, [(0, 0, True), (0, 1, True)])
        take(two, exported(one, with_samples=False), "short")
        assert two.samples("00000101") == []
        merge(two, one)
        assert whole(two) == whole(one)

    def test_what_is_cut_or_changed_is_refused_and_nothing_changes(self, new: New) -> None:
        one, two = new(), new()
        fill(one, 1, [(0, 0, True), (1, 1, True), (0, 2, False)])
        fill(two, 2, [(0, 0, True)])
        good, before = whole(one), whole(two)

        @settings(max_examples=10 * self.examples, deadline=None)
        @given(st.integers(0, len(good) - 1), st.binary(max_size=3), st.integers(0, 3))
        def holds(at: int, put: bytes, lost: int) -> None:
            bad = good[:at] + put + (good[at + lost :] if lost else b"")
            if bad == good:
                return
            with pytest.raises(Refused, match="Nothing was imported") as caught:
                take(two, read_lines(io.BytesIO(bad)), "file.jsonl")
            assert "\n" not in str(caught.value) and "file.jsonl, line " in str(caught.value)
            assert whole(two) == before

        holds()

    @pytest.mark.parametrize(
        ("field", "value", "says"),
        [
            ("id", "no-hex", "not 8 to 32"),
            ("config", {"x": "a\x00b"}, "NUL"),
            ("config", {"x": "\ud800"}, "surrogate"),
            ("config", [], "wrong type"),
            ("config", {"x": json.loads("[" * 70 + "]" * 70)}, "nested"),
            ("metrics", {"x": None}, "not a number"),
            ("metrics", {"x": "1"}, "not a number"),
            ("metrics", {"x": 10**400}, "too large"),
            ("seed", 1 << 63, "too large"),
            ("seed", True, "wrong type"),
            ("counted", 1, "wrong type"),
            ("stage", "x" * 81, "80 are the most"),
            ("scenario_key", "s1:none", "does not stand before"),
            ("samples", {"count": 1}, "count and a blob"),
            ("samples", {"count": 1, "blob": "%%%"}, "base64|Only"),
            ("ended_at", "'; DROP TABLE trials", "wrong type"),
            ("more", 1, "the fields of a trial"),
        ],
    )
    def test_a_well_sealed_file_of_bad_trials_is_refused_whole(
        self, new: New, field: str, value: Any, says: str
    ) -> None:
        one, two = new(), new()
        fill(one, 1, [(0, 0, True), (0, 1, True)])
        lines = [*exported(one)]
        trial = json.loads(lines[-2])
        trial["trial"][field] = value
        text = json.dumps(trial).encode() + b"\n"
        writer = Writer("1.0")
        sealed = [writer.head(), *(writer.record(*next(iter(json.loads(x).items()))) for x in lines[1:-2])]
        before = whole(two)
        with pytest.raises(Refused, match=says):
            take(two, [*sealed, text, writer.end()], "file")
        assert whole(two) == before

    def test_numbers_that_json_lacks_and_deep_nesting_are_refused(self, new: New) -> None:
        one, two = new(), new()
        fill(one, 1, [(0, 0, True)])
        lines = [*exported(one)]
        for bad in (b"NaN", b"Infinity", b"1e999", b"[" * 100_000, b"9" * 5000, b'"\x00"', b'"\xff"', b"{}{}"):
            text = lines[-2].replace(b'"ended_at":1002.5', b'"ended_at":' + bad)
            assert text != lines[-2]
            with pytest.raises(Refused):
                take(two, [*lines[:-2], text, lines[-1]], "file")
        assert two.scenarios() == []

    def test_keys_must_fit_their_content(self, new: New) -> None:
        one, two = new(), new()
        fill(one, 1, [(0, 0, True)])
        for kind in ("hardware", "scenario"):
            lines = [*exported(one)]
            at = next(i for i, line in enumerate(lines) if kind in json.loads(line))
            lines[at] = lines[at].replace(b'"A100"', b'"H100"').replace(b'"engine":"native"', b'"engine":"vllm"')
            with pytest.raises(Refused, match="its content has the key"):
                take(two, resealed(lines), "file")
        assert two.scenarios() == []

    def test_a_newer_schema_is_refused_and_says_what_to_type(self, new: New) -> None:
        store = new()
        fill(store, 1, [(0, 0, True)])
        before = whole(store)
        for field in ("schema", "format"):
            head, *rest = exported(store)
            later = json.loads(head)
            later["autotune_tuning_db"][field] = 99
            with pytest.raises(Refused, match=r"99.*this tool knows up to.*pip install -U autotune"):
                take(store, [json.dumps(later).encode() + b"\n", *rest], "later.jsonl")
        assert whole(store) == before

    def test_other_content_under_a_known_id_is_refused(self, new: New) -> None:
        one, two = new(), new()
        for store, value in ((one, 1.0), (two, 2.0)):
            store.add(make_trial(store.ensure(make_scenario()), id="aaaa0000", metrics={"x": value}))
            store.add(make_trial(make_scenario().key, id="bbbb0000"))
        before = whole(two)
        with pytest.raises(Refused, match="trial aaaa0000 is stored here with other content"):
            merge(two, one)
        three = new()
        three.put_reference(Reference("r1:x", "quality", {}, b"one"))
        four = new()
        four.put_reference(Reference("r1:x", "quality", {}, b"two"))
        with pytest.raises(Refused, match="reference r1:x"):
            merge(three, four)
        assert whole(two) == before

    def test_records_twice_out_of_order_or_of_an_unknown_kind_are_refused(self, new: New) -> None:
        one, two = new(), new()
        fill(one, 1, [(0, 0, True), (0, 1, True)])
        lines = [*exported(one)]
        moved = ([*lines, lines[-2]], [*lines[:-1], lines[-2]], [lines[0], *lines[::-1]], [lines[0], *lines], lines[1:])
        strange = ([lines[0], b'{"other":{}}\n'], [b"\n"], [b"[1]\n"], [b'{"a":1,"b":2}\n'], [])
        for changed in (*moved, *strange):
            with pytest.raises(Refused):
                take(two, changed, "file")
        assert two.scenarios() == []

    def test_a_database_merged_into_itself_stays_as_it_is(self, new: New) -> None:
        store = new()
        fill(store, 1, [(0, 0, True), (1, 0, False)])
        before = whole(store)
        assert merge(store, store).new_trials == 0
        assert whole(store) == before

    def test_a_value_that_contains_itself_is_never_stored(self, new: New) -> None:
        store = new()
        loop: dict[str, Any] = {}
        loop["loop"] = loop
        with pytest.raises(BadValue, match="contains itself"):
            store.add(make_trial(store.ensure(make_scenario()), config=loop))
        assert store.trials() == []

    def test_many_trials_pass_in_batches(self, new: New, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tuning_db.exchange.BATCH", 7)
        one, two = new(), new()
        key = one.ensure(make_scenario())
        trials = [make_trial(key, id=f"{n:08x}", seconds={"run": 1}) for n in range(30)]
        for trial in trials:
            one.add(trial)
        assert merge(two, one).new_trials == 30
        assert [replace(t, seconds={}) for t in two.trials()] == [replace(t, seconds={}) for t in trials]

    def test_a_readonly_database_takes_nothing(self, new: New, tmp_path: Path) -> None:
        store = new()
        fill(store, 1, [(0, 0, True)])
        lines = [*exported(store)]
        with open_store(tmp_path / "ro.db") as made:
            made.ensure(make_scenario())
        with open_store(tmp_path / "ro.db", readonly=True) as reader, pytest.raises(StoreError):
            take(reader, lines, "file")
