"""How several searches share one scenario: each piece of work is claimed before it is measured. Measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

from tuning_db import Store
from tuning_db.claims import Claim, kept

POLL_SECONDS = 2.0
"""How long to wait before looking again whether another search has finished what this one needs."""


class Shared:
    """One scenario's work. ``pause`` waits a moment; it is called only while another search holds what is needed."""

    def __init__(self, store: Store, scenario_key: str, pause: Callable[[float], None]) -> None:
        self._store, self._key, self._sleep = store, scenario_key, pause

    @contextmanager
    def hold(self, slot: str, limit: int | None = None) -> Iterator[Claim | None]:
        """The claim on ``slot`` while the block runs, or None when it is another's; see `Store.claim`."""
        claim = self._store.claim(self._key, slot, limit)
        if claim is None:
            yield None
            return
        with kept(self._store, claim):
            yield claim

    def others(self, stage: str) -> set[str]:
        """What other searches are doing now in a stage, by the name after ``stage/``."""
        slots = (slot.partition("/") for slot in self._store.claimed(self._key))
        return {name for found, _, name in slots if found == stage}

    def pause(self) -> None:
        """Wait a moment for the others."""
        self._sleep(POLL_SECONDS)


def stand_in(values: list[float | None]) -> float | None:
    """What a sampler is told of a configuration that another search is measuring: the median so far.

    The constant liar of Ginsbourger, Le Riche and Carraro (2010): it keeps the sampler from proposing that
    configuration again without pretending that it failed. The measured value replaces it.
    """
    known = [value for value in values if value is not None]
    return median(known) if known else None
