"""Recorded loads: prompts, ShareGPT conversations and traces of lengths and times, read from files. Sends nothing."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

MILLISECONDS = 1e-3
ASKING, ANSWERING = ("human", "user"), ("gpt", "assistant", "chatgpt", "bard")
FORMATS = (
    ".txt: a prompt a line; .jsonl: lines with prompt, or with timestamp (ms), input_length and output_length; "
    ".json: ShareGPT conversations; .csv: TIMESTAMP, ContextTokens and GeneratedTokens"
)
Encode = Callable[[str], Sequence[int]]


class RecordedError(ValueError):
    """A file that cannot be read as a recorded load; the message names the file, the place and what it wants."""


@dataclass(frozen=True, slots=True)
class Said:
    """One recorded turn: ``tokens`` where its text is known, else ``length`` alone; ``output`` tokens, 0: unknown."""

    tokens: tuple[int, ...]
    length: int
    output: int


@dataclass(frozen=True, slots=True)
class Session:
    """Turns of one conversation, the first at ``arrival`` seconds after the first of the file."""

    arrival: float
    turns: tuple[Said, ...]


def read(path: Path, encode: Encode) -> tuple[Session, ...]:
    """The sessions of ``path`` by its suffix (see FORMATS), in order of arrival. Raises RecordedError."""
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise RecordedError(f"{path} is no recorded load that can be read; {FORMATS}")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecordedError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RecordedError(f"{path} is not UTF-8 text") from None
    try:
        found = [session for session in reader(text, encode) if session.turns]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise RecordedError(f"{path}: {reason}; {FORMATS}") from None
    if not found:
        raise RecordedError(f"{path} holds no prompt; {FORMATS}")
    found.sort(key=lambda session: session.arrival)
    first = found[0].arrival
    return tuple(Session(session.arrival - first, session.turns) for session in found)


def digest(sessions: Sequence[Session]) -> str:
    """What was recorded, as a key: equal for equal sessions."""
    return hashlib.sha256(repr(tuple(sessions)).encode()).hexdigest()[:16]


def _text(encode: Encode, text: str, output: int = 0) -> Said:
    tokens = tuple(encode(text))
    return Said(tokens, len(tokens), output)


def _lines(text: str, encode: Encode) -> Iterator[Session]:
    for line in text.splitlines():
        if line.strip():
            yield Session(0.0, (_text(encode, line),))


def _json_lines(text: str, encode: Encode) -> Iterator[Session]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            raise ValueError(f"line {number} is no JSON") from None
        at = float(row.get("timestamp", 0)) * MILLISECONDS
        if "prompt" in row:
            yield Session(at, (_text(encode, str(row["prompt"]), _count(row.get("max_tokens", 0), number)),))
        else:
            lengths = _count(row["input_length"], number), _count(row["output_length"], number)
            yield Session(at, (Said((), *lengths),))


def _share_gpt(text: str, encode: Encode) -> Iterator[Session]:
    for conversation in json.loads(text):
        turns: list[Said] = []
        for message in conversation["conversations"]:
            who, what = str(message["from"]), str(message["value"])
            if who in ASKING and what:
                turns.append(_text(encode, what))
            elif who in ANSWERING and turns and not turns[-1].output:
                turns[-1] = Said(turns[-1].tokens, turns[-1].length, len(encode(what)))
        yield Session(0.0, tuple(turns))


def _table(text: str, encode: Encode) -> Iterator[Session]:
    for number, row in enumerate(csv.DictReader(text.splitlines()), 2):
        lengths = _count(row["ContextTokens"], number), _count(row["GeneratedTokens"], number)
        yield Session(_moment(row["TIMESTAMP"]), (Said((), *lengths),))


def _moment(text: str) -> float:
    """Seconds of a timestamp, which is a number of seconds or a date with up to seven decimals of a second."""
    try:
        return float(text)
    except ValueError:
        whole, _, decimals = text.partition(".")
        return datetime.fromisoformat(whole).timestamp() + float(f"0.{decimals or 0}")


def _count(value: Any, line: int) -> int:
    number = int(value)
    if number < 0:
        raise ValueError(f"line {line}: {number} tokens")
    return number


_READERS: dict[str, Callable[[str, Encode], Iterator[Session]]] = {
    ".txt": _lines, ".jsonl": _json_lines, ".json": _share_gpt, ".csv": _table,
}  # fmt: skip
