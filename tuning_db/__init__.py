"""What was measured, on which hardware, for which question. Imports nothing of `autotune`.

Importing this package loads no database library; `open_store` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuning_db.canonical import canonical, digest
from tuning_db.errors import (
    Ambiguous,
    BadValue,
    Damaged,
    DuplicateTrial,
    NotFound,
    QueryError,
    Refused,
    StoreError,
    StoreWarning,
)
from tuning_db.records import Hardware, Reference, Sample, Scenario, Trial, host_digest, new_id

if TYPE_CHECKING:
    from tuning_db.store import Store

__all__ = [
    "Ambiguous",
    "BadValue",
    "Damaged",
    "DuplicateTrial",
    "Hardware",
    "NotFound",
    "QueryError",
    "Reference",
    "Refused",
    "Sample",
    "Scenario",
    "Store",
    "StoreError",
    "StoreWarning",
    "Trial",
    "canonical",
    "digest",
    "host_digest",
    "new_id",
    "open_store",
]


def open_store(url: str | Path | None = None, *, readonly: bool = False) -> Store:
    """Open or create the database at a path or URL; None is the platform's data folder. Raises StoreError."""
    from tuning_db.store import Store

    return Store.open(url, readonly=readonly)


def __getattr__(name: str) -> Any:
    if name == "Store":
        from tuning_db.store import Store

        return Store
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
