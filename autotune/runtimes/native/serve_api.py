"""OpenAI's completion requests and answers as values: checks the one, writes the other. Knows no engine."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from autotune.runtimes.native.serve_http import HttpError
from autotune.runtimes.native.text import Growing, Text, TextError

PROMPTS = 64
STOPS = 16
LOGPROBS = 20
_IGNORED = ("user", "metadata")
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "top_p": (1,), "presence_penalty": (0,),
    "frequency_penalty": (0,), "logit_bias": ({},),
}  # fmt: skip
"""What clients send although it is the default, and the only values of it that are answered."""
_OWN = (
    "model", "prompt", "max_tokens", "temperature", "seed", "stream", "stream_options", "logprobs", "stop",
    "ignore_eos", "return_token_ids",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one request may ask: token ids below ``vocabulary``, and at most ``tokens`` of prompt and answer."""

    model: str
    vocabulary: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A completion request, checked. ``logprobs`` is None where none are wanted."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    temperature: float
    seed: int
    stream: bool
    usage: bool
    logprobs: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    ids: bool


def parse(body: bytes, text: Text, bounds: Bounds) -> Asked:
    """The request in ``body``. Raises HttpError 400 or 404, naming the wrong field.

    Defaults are OpenAI's: 16 tokens at temperature 1, with a new seed each time.
    """
    fields = _Fields(_document(body))
    fields.known()
    model = fields.get("model", str, bounds.model)
    if model != bounds.model:
        raise HttpError(
            404, f"there is no model {model!r} here, only {bounds.model!r}", param="model", code="model_not_found"
        )
    seed = fields.number("seed", None, -(2**63), 2**63 - 1)
    options = fields.get("stream_options", dict, {})
    asked = Asked(
        prompts=_prompts(fields, text, bounds.vocabulary),
        max_tokens=int(fields.number("max_tokens", 16, 1, 2**31 - 1)),
        temperature=float(fields.number("temperature", 1.0, 0.0, 2.0, whole=False)),
        seed=secrets.randbelow(2**31) if seed is None else int(seed) % 2**31,
        stream=fields.get("stream", bool, False),
        usage=options.get("include_usage", False) is True,
        logprobs=fields.number("logprobs", None, 0, LOGPROBS),
        stop=_stops(fields),
        ignore_eos=fields.get("ignore_eos", bool, False),
        ids=fields.get("return_token_ids", bool, not text.there),
    )
    if asked.stream and asked.logprobs is not None:
        raise HttpError(400, "logprobs come only with stream=false", param="logprobs")
    if not text.there and (asked.stop or asked.logprobs is not None):
        raise HttpError(400, "stop and logprobs need a tokenizer, and this model has none", param="stop")
    longest = max(map(len, asked.prompts))
    if longest + asked.max_tokens > bounds.tokens:
        raise HttpError(
            400,
            f"{longest} prompt tokens and max_tokens={asked.max_tokens} exceed the {bounds.tokens} tokens that this "
            "configuration holds",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return asked


class _Fields:
    """The fields of a request; a null counts as absent."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.values = {name: value for name, value in document.items() if value is not None}

    def known(self) -> None:
        for name, value in self.values.items():
            if name in _FIXED:
                if value not in _FIXED[name]:
                    raise HttpError(400, f"{name}={json.dumps(value)[:40]} is not supported", param=name)
            elif name not in _OWN and name not in _IGNORED:
                near = get_close_matches(name, _OWN, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise HttpError(400, f"unknown field {name[:80]!r}{hint}", param=name[:80])

    def get(self, name: str, kind: type, default: Any) -> Any:
        value = self.values.get(name, default)
        if not isinstance(value, kind):
            words = {str: "text", bool: "true or false", dict: "an object"}[kind]
            raise HttpError(400, f"{name} must be {words}, not {json.dumps(value)[:40]}", param=name)
        return value

    def number(self, name: str, default: Any, low: float, high: float, whole: bool = True) -> Any:
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not low <= value <= high:
            kind = "a whole number" if whole else "a number"
            raise HttpError(400, f"{name} must be {kind} from {low:g} to {high:g}, not {str(value)[:40]}", param=name)
        return value


def _document(body: bytes) -> Mapping[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise HttpError(400, "the body is not valid JSON") from None
    if not isinstance(document, dict):
        raise HttpError(400, "the body is not a JSON object")
    return document


def _prompts(fields: _Fields, text: Text, vocabulary: int) -> tuple[tuple[int, ...], ...]:
    prompt = fields.values.get("prompt")
    if prompt is None:
        raise HttpError(400, "prompt is missing", param="prompt")
    single = isinstance(prompt, str) or (isinstance(prompt, list) and all(_is_id(part) for part in prompt))
    several = [prompt] if single else prompt
    if not isinstance(several, list) or not 1 <= len(several) <= PROMPTS:
        raise HttpError(400, f"prompt must be text, token ids, or a list of 1 to {PROMPTS} of them", param="prompt")
    return tuple(_prompt(part, text, vocabulary) for part in several)


def _prompt(prompt: Any, text: Text, vocabulary: int) -> tuple[int, ...]:
    if isinstance(prompt, str):
        try:
            ids = text.encode(prompt)
        except TextError as error:
            raise HttpError(400, str(error), param="prompt") from None
    elif isinstance(prompt, list) and all(_is_id(part) for part in prompt):
        ids = prompt
    else:
        raise HttpError(400, "a prompt must be text or a list of token ids", param="prompt")
    if not ids:
        raise HttpError(400, "a prompt is empty", param="prompt")
    if not all(0 <= token < vocabulary for token in ids):
        raise HttpError(400, f"a token id is outside 0 to {vocabulary - 1}", param="prompt")
    return tuple(ids)


def _is_id(value: Any) -> bool:
    return type(value) is int


def _stops(fields: _Fields) -> tuple[str, ...]:
    stop = fields.values.get("stop", [])
    several = [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(several, list)
        or len(several) > STOPS
        or not all(isinstance(part, str) and 0 < len(part) <= 1000 for part in several)
    ):
        raise HttpError(400, f"stop must be text or a list of at most {STOPS} texts", param="stop")
    return tuple(several)


class Output:
    """One choice as it grows: its text up to a stop string, which may come in pieces, and why it ended."""

    def __init__(self, text: Text, stop: Sequence[str]) -> None:
        self.tokens: list[int] = []
        self.finish: str | None = None
        self._growing = Growing(text) if text.there else None
        self._stop = stop
        self._held = ""

    def push(self, tokens: Sequence[int], finish: str | None) -> str:
        """The text that may be given out now. Sets ``finish``, to ``stop`` when a stop string came."""
        self.tokens += tokens
        self.finish = finish
        if self._growing is None:
            return ""
        text = self._held + self._growing.push(tokens, last=finish is not None)
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.finish, self._held = "stop", ""
            return text[: min(found)]
        keep = 0 if finish is not None else max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that may be the beginning of ``stop``."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def choice(index: int, text: str, finish: str | None, logprobs: Any, ids: Sequence[int] | None) -> dict[str, Any]:
    """One entry of ``choices``; ``ids`` of None leaves the token ids out."""
    found = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
    return found if ids is None else {**found, "token_ids": list(ids)}


def usage(asked: Asked, generated: int) -> dict[str, int]:
    """Counts of tokens."""
    prompts = sum(map(len, asked.prompts))
    return {"prompt_tokens": prompts, "completion_tokens": generated, "total_tokens": prompts + generated}


def logprobs(text: Text, tokens: Sequence[int], score: Any, prompt: int, top: int) -> dict[str, Any]:
    """OpenAI's logprobs of ``tokens``, which followed ``prompt`` tokens in the scored sequence (see `base.Score`)."""
    texts = [text.token(token) for token in tokens]
    rows = range(prompt - 1, prompt - 1 + len(tokens))
    tops = [
        {text.token(int(i)): float(v) for i, v in zip(score.ids[r][:top], score.top[r][:top], strict=True)}
        for r in rows
    ]
    offsets = [0]
    for piece in texts:
        offsets.append(offsets[-1] + len(piece))
    return {
        "tokens": texts,
        "token_logprobs": [float(score.logprobs[r]) for r in rows],
        "top_logprobs": tops if top else None,
        "text_offset": offsets[:-1],
    }
