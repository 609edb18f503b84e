"""Which requests an engine can run at all. Knows nothing of when."""

from __future__ import annotations

from collections.abc import Sequence


def check_request(prompt: Sequence[int], max_tokens: int, vocabulary: int, room: int) -> None:
    """Raises ValueError for a request that can never run in a cache of ``room`` tokens."""
    if not prompt or max_tokens < 1:
        raise ValueError("a request needs at least one prompt token and max_tokens of at least 1")
    wrong = next((t for t in prompt if not 0 <= t < vocabulary), None)
    if wrong is not None:
        raise ValueError(f"token {wrong} is outside the vocabulary of {vocabulary}")
    if len(prompt) + max_tokens > room:
        raise ValueError(f"{len(prompt)} + {max_tokens} tokens do not fit the cache of {room} (knob kv_tokens)")
