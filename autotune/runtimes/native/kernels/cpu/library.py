"""Compiles the C kernels for this processor, keeps the result on disk, and describes their arguments to ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from functools import cache
from pathlib import Path

import platformdirs

FLAGS = [
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-Wno-psabi",
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-lm",
]
KINDS = {"fp32": 0, "bf16": 1, "int8": 2, "int4": 3}
CHUNK = 128
"""Inputs that one block of 4-bit words holds; stored rows are padded to it."""
LANES = 16
"""Floats in a vector: sizes that the kernels walk through must be multiples of it."""
STREAMS, EXPERTS = 6, 1024
"""The largest counts that the kernels have room for."""


class Weight(Structure):
    """A stored weight; whoever makes one keeps its tensors alive."""

    _fields_ = (
        ("kind", c_int64), ("rows", c_int64), ("cols", c_int64), ("group", c_int64),
        ("data", c_void_p), ("scale", c_void_p),
    )  # fmt: skip


class Latents(Structure):
    """A pool of latents, with a scale a row for int8."""

    _fields_ = (("kind", c_int64), ("width", c_int64), ("rows", c_void_p), ("scale", c_void_p))


class Hyper(Structure):
    """The constants of one `kernels.hyper`."""

    _fields_ = (
        ("streams", c_int64), ("size", c_int64), ("iterations", c_int64), ("eps", c_float), ("norm_eps", c_float),
        ("base", c_void_p), ("scale", c_void_p), ("norm", c_void_p), ("fn", Weight),
    )  # fmt: skip


class Kda(Structure):
    """The constants of one layer's `kernels.kda_decode`."""

    _fields_ = (
        ("heads", c_int64), ("size", c_int64), ("taps", c_int64), ("narrow", c_int64), ("bound", c_float),
        ("eps", c_float), ("conv_taps", c_void_p), ("dt_bias", c_void_p), ("rate", c_void_p), ("o_norm", c_void_p),
    )  # fmt: skip


class Moe(Structure):
    """One mixture of experts; the arrays end with the shared expert."""

    _fields_ = (
        ("experts", c_int64), ("first", c_int64), ("local", c_int64), ("top", c_int64), ("size", c_int64),
        ("scaling", c_float), ("limit", c_float), ("bias", c_void_p), ("router", Weight),
        ("gate_up", POINTER(Weight)), ("down", POINTER(Weight)),
    )  # fmt: skip


SIGNATURES = {  # p: pointer, l: 64-bit integer, f: float
    "linear": "pplpl",
    "dense": "pp",
    "hyper_read": "pplpppl",
    "hyper_write": "pppplll",
    "kda_step": "pppppppppl",
    "kda_segment": "pppppppplplpp",
    "experts": "pplpl",
    "latent_step": "ppllplplpplfpl",
    "choose": "ppppllllllpp",
}


def compiler() -> str | None:
    """The C compiler, None where there is none."""
    return shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")


@cache
def library(block: int = 4, ahead: int = 8192) -> ctypes.CDLL | None:
    """The kernels built with ``block`` output rows at a time and ``ahead`` bytes of prefetch; None without a compiler.

    Compiling takes about two seconds, once for each source, processor and pair of parameters.
    """
    found = compiler()
    if found is None:
        return None
    sources = sorted(Path(__file__).parent.glob("*.[ch]"))
    words = [*FLAGS, f"-DBLOCK={block}", f"-DAHEAD={ahead}"]
    identity = "".join([*words, found, _processor(), *(s.read_text() for s in sources)])
    folder = platformdirs.user_cache_path("autotune", ensure_exists=True) / "kernels"
    folder.mkdir(exist_ok=True)
    target = folder / f"cpu-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.so"
    if not target.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            made = Path(work) / target.name
            main = next(s for s in sources if s.suffix == ".c")
            done = subprocess.run([found, str(main), "-o", str(made), *words], capture_output=True, text=True)
            if done.returncode:
                return None
            made.replace(target)  # atomic: two launches may compile at once
    loaded = ctypes.CDLL(str(target))
    types = {"p": c_void_p, "l": c_int64, "f": c_float}
    for name, signature in SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = [types[letter] for letter in signature], None
    return loaded


@cache
def refusal() -> str:
    """Why there are no C kernels here, empty when there are."""
    if compiler() is None:
        return "there is no C compiler (install gcc)"
    return "" if library() is not None else f"{compiler()} cannot compile the kernels for this processor"


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
