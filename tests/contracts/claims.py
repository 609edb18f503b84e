"""What every tuning database must do about claims; a part of the store's contract."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
from contracts.records import make_scenario, make_trial

from tuning_db import BadValue, NotFound, Store, open_store
from tuning_db import claims as leases


class ClaimsContract:
    """Inherited through `StoreContract`."""

    @pytest.fixture
    def key(self, store: Store) -> str:
        return store.ensure(make_scenario())

    def test_work_is_claimed_once_and_again_after_its_release(self, store: Store, key: str) -> None:
        claim = store.claim(key, "search/a")
        assert claim is not None and store.claim(key, "search/a") is None
        other = store.claim(key, "search/b")
        assert other is not None and store.claimed(key) == {"search/a", "search/b"}
        store.release(claim)
        assert store.claimed(key) == {"search/b"}
        assert store.claim(key, "search/a") is not None

    def test_claims_of_two_scenarios_do_not_meet(self, store: Store, key: str) -> None:
        second = store.ensure(make_scenario(engine="other"))
        assert store.claim(key, "search/a") and store.claim(second, "search/a")

    def test_a_claim_needs_a_scenario_and_a_short_name(self, store: Store, key: str) -> None:
        with pytest.raises(NotFound, match="ensure"):
            store.claim("s1:none", "search/a")
        with pytest.raises(BadValue, match="slot"):
            store.claim(key, "search/" + "x" * 80)

    def test_of_many_that_claim_at_once_one_gets_it(self, address: Any, store: Store, key: str) -> None:
        gate, got = threading.Barrier(6), []

        def race() -> None:
            with open_store(address) as mine:
                for number in range(10):
                    gate.wait()
                    got.append((number, mine.claim(key, f"search/{number}")))

        threads = [threading.Thread(target=race) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(number for number, claim in got if claim) == list(range(10))

    def test_trials_and_claims_together_stay_within_the_limit(self, store: Store, key: str) -> None:
        store.add(make_trial(key))
        store.add(make_trial(key, counted=False))
        store.add(make_trial(key, stage="confirm"))
        first = store.claim(key, "search/a", limit=3)
        assert first and store.claim(key, "search/b", limit=3) and store.claim(key, "confirm/1")
        assert store.claim(key, "search/c", limit=3) is None
        store.release(first)
        assert store.claim(key, "search/c", limit=3)

    def test_a_lease_that_ran_out_is_taken_over_and_the_late_result_does_not_count(
        self, store: Store, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(leases, "LEASE_SECONDS", -1.0)
        slow = store.claim(key, "search/a")
        monkeypatch.undo()
        quick = store.claim(key, "search/a")
        assert slow and quick and (slow.attempt, quick.attempt) == (1, 2)
        trial = make_trial(key)
        assert not store.renew(slow) and store.renew(quick)
        stored = store.add(replace(trial, id="f" * 20), claim=slow)
        assert (stored.counted, stored.provenance["late"]) == (False, True)
        store.release(slow)
        assert store.claimed(key) == {"search/a"}
        assert store.add(trial, claim=quick) == trial
        assert store.trials(key) == [trial, stored]

    def test_a_late_result_counts_when_nobody_took_the_work_over(
        self, store: Store, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(leases, "LEASE_SECONDS", -1.0)
        claim = store.claim(key, "search/a")
        assert store.add(make_trial(key), claim=claim).counted

    def test_the_lease_is_renewed_while_the_work_goes_on_and_released_after_it(self, store: Store, key: str) -> None:
        class Away(Store):
            calls = 0

            def renew(self, claim: leases.Claim) -> bool:
                Away.calls += 1
                if Away.calls == 1:
                    raise NotFound("the database is away")
                renewed.set()
                return super().renew(claim)

        renewed, claim = threading.Event(), store.claim(key, "search/a")
        assert claim
        away = Away(store.engine, store.where, store._explain)
        with leases.kept(away, claim, every=0.01):
            assert renewed.wait(30)
            assert store.claim(key, "search/a") is None
        assert store.claimed(key) == set()
