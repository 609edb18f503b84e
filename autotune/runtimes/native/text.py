"""Text to token ids and back, whole or as it grows, through a checkpoint's tokenizer.json. Knows no engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_UNFINISHED = "\ufffd"
_WINDOW = 16
"""Tokens after which a growing text no longer decodes its beginning anew."""


class TextError(ValueError):
    """Text that cannot be turned into tokens, or the other way round."""


class Text:
    """The tokenizer of one checkpoint folder, read when first needed. Token ids work without one."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tokenizer.json"
        self._tokenizer: Tokenizer | None = None

    @property
    def there(self) -> bool:
        """Whether the checkpoint has a tokenizer at all."""
        return self._tokenizer is not None or self.path.is_file()

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``. Raises TextError without a tokenizer, or for half a surrogate pair."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise TextError("the text holds half a surrogate pair, which is no character") from None
        return self._load().encode(text).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens`` without special tokens. Raises TextError without a tokenizer."""
        return self._load().decode(list(tokens))

    def token(self, token: int) -> str:
        """One token as text; part of a character is named as the vocabulary names it."""
        text = self._load().decode([token], skip_special_tokens=False)
        return text if _UNFINISHED not in text else self._load().id_to_token(token) or text

    def _load(self) -> Tokenizer:
        if self._tokenizer is None:
            if not self.path.is_file():
                raise TextError(f"{self.path.parent} has no tokenizer.json; give token ids instead of text")
            from tokenizers import Tokenizer

            try:
                self._tokenizer = Tokenizer.from_file(str(self.path))
            except Exception as error:  # the library raises nothing narrower
                raise TextError(f"{self.path} cannot be read as a tokenizer: {error}") from None
        return self._tokenizer


class Growing:
    """Decodes a growing list of tokens. The pieces joined are the decoded whole, and no piece ends inside a character.

    Holds back a last U+FFFD, which the next bytes may complete, and decodes only a window, whose first half was given
    out before and is there because some decoders treat the first token of a text differently.
    """

    def __init__(self, text: Text) -> None:
        self._text = text
        self._tokens: list[int] = []
        self._start = 0
        self._clean = 0
        self._given = 0

    def push(self, tokens: Sequence[int], last: bool = False) -> str:
        """What ``tokens`` add to the text; with ``last`` also what was held back."""
        self._tokens += tokens
        text = self._text.decode(self._tokens[self._start :])
        ready = text if last or not text.endswith(_UNFINISHED) else text[:-1]
        new = ready[self._given :]
        self._given = max(self._given, len(ready))
        if len(ready) == len(text) and len(self._tokens) - self._clean >= _WINDOW:
            self._start, self._clean = self._clean, len(self._tokens)
            self._given = len(self._text.decode(self._tokens[self._start :]))
        return new
