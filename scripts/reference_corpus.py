"""The reference model's text: the running interpreter's standard library and its reference manual, PSF-2.0.

Knows which files and topics are training text, which are held out, and how well a plain order-2 byte model does on
them; knows nothing of the network.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from numpy.typing import NDArray

SEPARATOR = b"\n\n\n"
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "lib2to3", "idlelib", "encodings", "site-packages", "pydoc_data", "__pycache__"}
)
GENERATED = frozenset(
    {"html/entities.py", "stringprep.py", "msilib/sequence.py", "msilib/schema.py", "pydoc_data/topics.py"}
)
HELD_OUT_MODULES = (
    "heapq.py",
    "textwrap.py",
    "shlex.py",
    "graphlib.py",
    "json/decoder.py",
    "contextlib.py",
    "queue.py",
    "sched.py",
    "fileinput.py",
    "concurrent/futures/thread.py",
    "urllib/robotparser.py",
    "email/policy.py",
)
HELD_OUT_PIECE = 9_000  # bytes of one document that are shipped: many documents say more than one long one
HELD_OUT_BYTES = 128_000


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training documents and held-out documents by name; the two share no file and no topic."""

    training: dict[str, bytes]
    held_out: dict[str, bytes]

    def training_text(self) -> bytes:
        """All training documents in a fixed order, separated by blank lines."""
        return SEPARATOR.join(self.training.values())

    def held_out_text(self) -> bytes:
        """Code and prose in turn, each document cut at a line end, at most ``HELD_OUT_BYTES``."""
        code = [cut(text) for name, text in self.held_out.items() if name.endswith(".py")]
        prose = [cut(text) for name, text in self.held_out.items() if not name.endswith(".py")]
        mixed: list[bytes] = []
        for index in range(max(len(code), len(prose))):
            mixed += code[index : index + 1] + prose[index : index + 1]
        return cut(SEPARATOR.join(mixed), HELD_OUT_BYTES)


def cut(text: bytes, limit: int = HELD_OUT_PIECE) -> bytes:
    """At most ``limit`` bytes of ``text``, ending with a whole line."""
    return text if len(text) <= limit else text[: text.rfind(b"\n", 0, limit) + 1]


def read_corpus(library: Path | None = None) -> Corpus:
    """The corpus of this interpreter, in sorted order of names."""
    root = library or Path(sysconfig.get_path("stdlib"))
    modules = read_modules(root)
    missing = [name for name in HELD_OUT_MODULES if name not in modules]
    if missing:
        raise SystemExit(f"{root} has no {', '.join(missing)}; run with CPython 3.11's own library")
    held_out = {name: modules.pop(name) for name in HELD_OUT_MODULES}
    prose = {f"topic {name}": text.strip().encode() + b"\n" for name, text in sorted(topics.items())}
    kept = {name: text for name, text in prose.items() if is_held_out(name)}
    known = {line for text in kept.values() for line in long_lines(text)}
    training = modules | {name: text for name, text in prose.items() if name not in kept and not repeats(text, known)}
    return Corpus(dict(sorted(training.items())), held_out | kept)


def read_modules(root: Path) -> dict[str, bytes]:
    """Hand-written modules below ``root``, by path."""
    modules = {}
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root).as_posix()
        folders = name.split("/")[:-1]
        if (
            name in GENERATED
            or name.startswith("_sysconfigdata")
            or any(folder in SKIPPED_FOLDERS or folder.startswith("config-") for folder in folders)
        ):
            continue
        text = file.read_bytes().replace(b"\r\n", b"\n")
        if len(text) > 200:
            modules[name] = text
    return modules


def is_held_out(topic: str) -> bool:
    """One topic of eight, by a digest of its name, so that the choice is fixed and blind."""
    return hashlib.sha256(topic.encode()).digest()[0] % 8 == 0


def long_lines(text: bytes) -> set[bytes]:
    return {line.strip() for line in text.splitlines() if len(line.strip()) >= 40}


def repeats(text: bytes, known: set[bytes]) -> bool:
    """Whether ``text`` shares two or more long lines with ``known``: some sections have two names in the manual."""
    return len(long_lines(text) & known) >= 2


def order2_bits(training: bytes, text: bytes) -> float:
    """Bits per byte of ``text`` under an order-2 byte model of ``training``.

    Interpolates orders 2, 1, 0 and uniform with Witten-Bell weights (Witten and Bell 1991): a context seen ``n`` times
    with ``k`` different successors keeps n / (n + k) for its own counts.
    """
    data = np.frombuffer(training, dtype=np.uint8).astype(np.int64)
    query = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
    probability: NDArray[np.float64] = np.full(len(query) - 2, 1 / 256)
    for order in range(3):
        contexts = 256**order
        counts = np.bincount(context(data, order) * 256 + data[2:], minlength=contexts * 256).reshape(contexts, 256)
        total, kinds = counts.sum(1), (counts > 0).sum(1)
        where = context(query, order)
        own = counts[where, query[2:]]
        probability = np.where(
            total[where] > 0,
            (own + kinds[where] * probability) / np.maximum(total[where] + kinds[where], 1),
            probability,
        )
    return float(-np.log2(probability).mean())


def context(data: NDArray[np.int64], order: int) -> NDArray[np.int64]:
    """The number that the ``order`` bytes before each byte from the third on spell."""
    if order == 0:
        return np.zeros(len(data) - 2, dtype=np.int64)
    return data[1:-1] if order == 1 else data[:-2] * 256 + data[1:-1]
