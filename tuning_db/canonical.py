"""Canonical JSON and the version-tagged digests made from it. Knows nothing of what the values mean."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

DEEPEST = 64
"""Nesting that no honest value reaches; a cycle does."""

_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode
_SCALARS = frozenset({str, int, float, bool, type(None)})
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def canonical(value: object) -> bytes:
    """UTF-8 JSON with sorted keys, no spaces, integers as integers and floats as their shortest exact decimal.

    Strings are not normalised, −0.0 becomes 0.0, tuples become lists. Raises ValueError for NaN, infinities, keys
    that are not strings, lone surrogates, cycles, and types that JSON does not have.
    """
    return encoded(value).encode("utf-8")


class Encoded(str):
    """Canonical JSON text, so that nobody encodes it again."""

    __slots__ = ()


def encoded(value: object, path: str = "value") -> Encoded:
    """The canonical JSON text of ``value``, which errors call ``path``. Raises ValueError as `canonical` does."""
    if isinstance(value, Encoded):
        return value
    return quick(value) or Encoded(_encode(plain(value, path)))


def quick(value: object) -> Encoded | None:
    """The canonical JSON text of plain JSON values, several times faster; None for whatever needs a closer look."""
    if not _is_plain(value, 0):
        return None
    try:
        text = _encode(value)
    except ValueError:
        return None
    if "\\u0000" in text or "-0.0" in text or not (text.isascii() or _UNSTORABLE.search(text) is None):
        return None
    return Encoded(text)


def _is_plain(value: object, depth: int) -> bool:
    if depth > DEEPEST:
        return False
    if type(value) is dict:
        for key, part in value.items():
            if type(key) is not str or not (type(part) in _SCALARS or _is_plain(part, depth + 1)):
                return False
        return True
    if type(value) is list or type(value) is tuple:
        return all(type(part) in _SCALARS or _is_plain(part, depth + 1) for part in value)
    return type(value) in _SCALARS


def digest(tag: str, value: object) -> str:
    """``tag`` and the first 128 bits of the SHA-256 of the canonical JSON, such as ``s1:0f3a…``."""
    return f"{tag}:{hashlib.sha256(canonical(value)).hexdigest()[:32]}"


def plain(value: object, path: str = "value", depth: int = 0) -> Any:
    """``value`` as plain dicts, lists and numbers. Raises ValueError naming the first part that JSON lacks."""
    if depth > DEEPEST:
        raise ValueError(f"{path[:80]}… is nested more than {DEEPEST} deep; a value that contains itself?")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(str(value), path)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{path} is {value!r}; only finite numbers can be stored")
        return float(value) + 0.0
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{path} has the key {key!r}; keys must be strings")
        return {
            _text(str(key), f"a key of {path}"): plain(part, f"{path}.{key}", depth + 1) for key, part in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [plain(part, f"{path}[{index}]", depth + 1) for index, part in enumerate(value)]
    raise ValueError(f"{path} is a {type(value).__name__}, which JSON does not have")


def _text(text: str, path: str) -> str:
    if _UNSTORABLE.search(text):
        raise ValueError(f"{path} holds a NUL character or half a surrogate pair: {text[:40]!r}")
    return text


def cleaned(value: object) -> Any:
    """``value`` with every NUL and lone surrogate replaced by U+FFFD, for free text such as the tail of a log."""
    if isinstance(value, str):
        return _UNSTORABLE.sub("�", value)
    if isinstance(value, Mapping):
        return {cleaned(key): cleaned(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [cleaned(part) for part in value]
    return value
