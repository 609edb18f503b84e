"""What can go wrong with a tuning database, as types with one sentence each. Knows no database library."""

from __future__ import annotations


class StoreError(Exception):
    """The database cannot be opened, read or written; the message ends with the next thing to type."""


class Damaged(StoreError):
    """A file of ours whose content is wrong; it was left as it is."""


class DuplicateTrial(StoreError):
    """The trial's id is taken, or its configuration already has its one counted search trial."""


class BadValue(StoreError):
    """A record holds what cannot be stored: a number that is not finite, a NUL in a key, an id of another form."""


class NotFound(StoreError):
    """No row has this key or id."""


class Ambiguous(StoreError):
    """An id prefix fits several trials; the message lists them."""


class QueryError(StoreError):
    """A filter that cannot be read; the message points at the place and names the nearest field."""


class Refused(StoreError):
    """A file of exported records that is cut short, changed, too new or not one at all; nothing of it was stored."""


class StoreWarning(UserWarning):
    """The database works, but where it lies puts it at risk."""
