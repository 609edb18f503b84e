"""Claims on work: who measures what, on a lease, so that several searches share one scenario without a double run.

Knows how a dead owner is recognised and how a lease is kept; knows nothing of what is measured.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, Connection, Double, Select, and_, cast, func, literal, select

from tuning_db.errors import NotFound, StoreError
from tuning_db.records import host_digest
from tuning_db.schema import claims, scenarios, trials

if TYPE_CHECKING:
    from tuning_db.store import Store

LEASE_SECONDS = 180.0
"""How long work stays claimed after the last sign of life of an owner on another machine."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to do one piece of work. ``token`` is this attempt's alone; ``attempt`` counts from 1."""

    scenario_key: str
    slot: str
    token: str
    attempt: int


def me() -> str:
    """This process, told apart from all others: host, PID namespace, PID and when it started."""
    return f"{host_digest()}/{_namespace()}/{os.getpid()}/{_started(os.getpid())}"


def is_gone(owner: str) -> bool:
    """Whether the process ``owner`` has ended for sure; False for one of another machine, which nobody can see."""
    place, _, rest = owner.rpartition("/")[0].rpartition("/")
    if place != f"{host_digest()}/{_namespace()}" or not rest.isdecimal():
        return False
    return _started(int(rest)) != owner.rpartition("/")[2]


def _namespace() -> str:
    with suppress(OSError):
        return str(Path("/proc/self/ns/pid").readlink()).replace("/", "")
    return ""


def _started(pid: int) -> str:
    """The start time of a living process in clock ticks; empty where there is none, or no /proc to ask."""
    with suppress(OSError, IndexError):
        words = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        return "" if words[0] in "ZX" else words[19]
    return ""


def take(connection: Connection, scenario_key: str, slot: str, limit: int | None) -> Claim | None:
    """Claim a slot in the caller's write transaction; see `Store.claim`."""
    # On PostgreSQL this makes claims of one scenario wait for each other; on SQLite the transaction already does.
    scenario = select(scenarios.c.key).where(scenarios.c.key == scenario_key).with_for_update(key_share=True)
    if connection.execute(scenario).first() is None:
        raise NotFound(f"no scenario has the key {scenario_key!r}; call ensure() first")
    held = {row.slot: row for row in connection.execute(_held(scenario_key))}
    now = connection.execute(select(_now(connection))).scalar_one()
    live = {name for name, row in held.items() if row.leased_until > now and not is_gone(row.owner)}
    if slot in live:
        return None
    if limit is not None:
        stage = slot.partition("/")[0]
        same = and_(trials.c.scenario_key == scenario_key, trials.c.stage == stage, trials.c.counted)
        done = connection.execute(select(func.count()).select_from(trials).where(same)).scalar_one()
        if done + sum(name.partition("/")[0] == stage for name in live) >= limit:
            return None
    claim = Claim(scenario_key, slot, uuid.uuid4().hex, held[slot].attempt + 1 if slot in held else 1)
    row = {
        "scenario_key": scenario_key,
        "slot": slot,
        "token": claim.token,
        "owner": me(),
        "attempt": claim.attempt,
        "leased_until": now + LEASE_SECONDS,
    }
    connection.execute(claims.delete().where(claims.c.scenario_key == scenario_key, claims.c.slot == slot))
    connection.execute(claims.insert(), row)
    return claim


def renew(connection: Connection, claim: Claim) -> bool:
    """Extend the lease; False when the claim is no longer this attempt's."""
    done = connection.execute(claims.update().where(_mine(claim)).values(leased_until=_now(connection) + LEASE_SECONDS))
    return done.rowcount == 1


def release(connection: Connection, claim: Claim) -> None:
    """Give the slot back, if it is still this attempt's."""
    connection.execute(claims.delete().where(_mine(claim)))


def is_mine(connection: Connection, claim: Claim) -> bool:
    """Whether the claim is still this attempt's; on PostgreSQL nobody takes it before the transaction ends."""
    return connection.execute(select(claims.c.slot).where(_mine(claim)).with_for_update()).first() is not None


def live(connection: Connection, scenario_key: str) -> set[str]:
    """The slots that somebody works on now."""
    now = connection.execute(select(_now(connection))).scalar_one()
    rows = connection.execute(_held(scenario_key))
    return {row.slot for row in rows if row.leased_until > now and not is_gone(row.owner)}


@contextmanager
def kept(store: Store, claim: Claim, every: float = LEASE_SECONDS / 3) -> Iterator[None]:
    """Renew the lease from a thread while the work goes on, and release it afterwards, whatever happened.

    A renewal that fails is tried again at the next turn: a database that is away for a moment costs no trial.
    """
    done = threading.Event()

    def renewing() -> None:
        while not done.wait(every):
            with suppress(StoreError):
                store.renew(claim)

    thread = threading.Thread(target=renewing, name=f"lease of {claim.slot}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        with suppress(StoreError):  # the lease runs out by itself
            store.release(claim)


def _held(scenario_key: str) -> Select[Any]:
    return select(claims).where(claims.c.scenario_key == scenario_key)


def _mine(claim: Claim) -> ColumnElement[bool]:
    return and_(claims.c.scenario_key == claim.scenario_key, claims.c.slot == claim.slot, claims.c.token == claim.token)


def _now(connection: Connection) -> ColumnElement[float]:
    """The Unix time: the server's, which all machines share, or on SQLite this one machine's."""
    if connection.dialect.name == "postgresql":
        return cast(func.extract("epoch", func.clock_timestamp()), Double)
    return literal(time.time())
