"""Token ids that prompts and quality checks are cut from: held-out text through the model's own tokenizer."""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib import resources
from pathlib import Path

FALLBACK_TOKENS = 65_536
PROMPT_SHARE = 0.5
"""The first half of the held-out text gives prompts and calibration, the second half is what quality is scored on."""


def heldout_text() -> str:
    """The held-out text (PSF-2.0, see the reference model's README); the reference model never saw it in training."""
    return (resources.files("autotune") / "data" / "heldout.txt").read_text(encoding="utf-8")


def read_tokens(folder: Path, vocab: int) -> list[int]:
    """Ids below ``vocab``. Without a tokenizer.json: seeded random ids, good for speed, meaningless for quality."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        source = random.Random(0)
        return [source.randrange(vocab) for _ in range(FALLBACK_TOKENS)]
    return _encode(file, heldout_text(), vocab)


def calibration_sequences(folder: Path, vocab: int, count: int, length: int) -> list[list[int]]:
    """At most ``count`` sequences of ``length`` ids spread evenly over the text that weights are calibrated on.

    That text is ``calibration.txt`` of the model's folder where there is one (with a tokenizer.json), else the half of
    `read_tokens` that quality is never scored on.
    """
    own, tokenizer = folder / "calibration.txt", folder / "tokenizer.json"
    if own.is_file() and tokenizer.is_file():
        tokens = _encode(tokenizer, own.read_text(encoding="utf-8"), vocab)
    else:
        tokens = read_tokens(folder, vocab)
        tokens = tokens[: int(len(tokens) * PROMPT_SHARE)]
    stride = max(len(tokens) // count, length)
    return [tokens[start : start + length] for start in range(0, max(len(tokens) - length, 0) + 1, stride)]


def encoder(folder: Path, vocab: int) -> Callable[[str], list[int]]:
    """Text to ids below ``vocab``; without a tokenizer.json, ids drawn by the text, one for each four characters."""
    file = folder / "tokenizer.json"

    def drawn(text: str) -> list[int]:
        source = random.Random(text)
        return [source.randrange(vocab) for _ in range(-(-len(text) // 4))]

    return (lambda text: _encode(file, text, vocab)) if file.is_file() else drawn


def _encode(tokenizer: Path, text: str, vocab: int) -> list[int]:
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(tokenizer)).encode(text, add_special_tokens=False).ids
    return [i for i in ids if i < vocab]
