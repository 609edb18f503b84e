"""Token ids that prompts and quality checks are cut from: held-out text through the model's own tokenizer."""

from __future__ import annotations

import random
from importlib import resources
from pathlib import Path

FALLBACK_TOKENS = 65_536


def heldout_text() -> str:
    """The held-out text (PSF-2.0, see the reference model's README); the reference model never saw it in training."""
    return (resources.files("autotune") / "data" / "heldout.txt").read_text(encoding="utf-8")


def read_tokens(folder: Path, vocab: int) -> list[int]:
    """Ids below ``vocab``. Without a tokenizer.json: seeded random ids, good for speed, meaningless for quality."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        source = random.Random(0)
        return [source.randrange(vocab) for _ in range(FALLBACK_TOKENS)]
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(file)).encode(heldout_text(), add_special_tokens=False).ids
    return [i for i in ids if i < vocab]
