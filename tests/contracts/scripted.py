"""A stand-in for the native engine whose answers are known, for tests of what sits on top of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autotune.runtimes.base import Score
from autotune.runtimes.native.text import Text

VOCABULARY = 256


class Scripted:
    """Answers with the prompt's own tokens, from its start again and again, one token a step and request.

    ``seconds`` is a step's length; a prompt that begins with token 255 breaks the engine, one with 254 is refused.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.live: dict[Any, tuple[Sequence[int], int, int]] = {}
        self.aborted: list[Any] = []
        self.added: list[tuple[Any, ...]] = []

    def add(self, request_id: Any, prompt_ids: Sequence[int], max_tokens: int, *sampling: Any) -> None:
        if prompt_ids[0] == 254:
            raise ValueError("no such request")
        self.live[request_id] = (prompt_ids, max_tokens, 0)
        self.added.append((prompt_ids, max_tokens, *sampling))

    def step(self) -> list[tuple[Any, list[int], str | None]]:
        time.sleep(self.seconds)
        events: list[tuple[Any, list[int], str | None]] = []
        for number, (prompt, wanted, done) in list(self.live.items()):
            if prompt[0] == 255:
                raise RuntimeError("device on fire")
            last = done + 1 == wanted
            events.append((number, [prompt[done % len(prompt)]], "length" if last else None))
            self.live[number] = (prompt, wanted, done + 1)
            if last:
                del self.live[number]
        return events

    def abort(self, request_id: Any) -> None:
        self.aborted.append(request_id)
        self.live.pop(request_id, None)

    def score(self, sequences: Sequence[Sequence[int]], top: int) -> list[Score]:
        if self.live:
            raise RuntimeError("score needs an idle engine")
        found = []
        for sequence in sequences:
            rows = len(sequence) - 1
            ids = np.tile(np.arange(65, 65 + top, dtype=np.int32), (rows, 1))
            logs = -np.asarray(sequence[1:], dtype=np.float32)
            found.append(Score(logs, ids, np.tile(-np.arange(top, dtype=np.float32), (rows, 1))))
        return found

    def effective(self) -> Mapping[str, Any]:
        return {"attention": "absorbed"}

    def counters(self) -> Mapping[str, float]:
        return {"prefix_hits": 3.0, "kv_used_tokens": 50.0}


class ScriptedLLM:
    """What the server needs of an `LLM`, on a `Scripted` engine."""

    vocabulary = VOCABULARY
    capacity = 100

    def __init__(self, folder: Path, seconds: float = 0.0) -> None:
        self.folder, self.engine = folder, Scripted(seconds)
        self.config = {"attention": "absorbed"}
        self.text = Text(folder)

    def effective(self) -> Mapping[str, Any]:
        return self.engine.effective()


def byte_tokenizer(folder: Path) -> Path:
    """Write a tokenizer.json whose 256 tokens are the 256 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {b: chr(b) for b in printable}
    others = (b for b in range(256) if b not in letters)
    letters.update({b: chr(256 + n) for n, b in enumerate(others)})
    tokenizer = Tokenizer(models.BPE({letter: byte for byte, letter in letters.items()}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
