"""Compiles every Triton kernel of the project for an A100 without one, and fails where it would not fit.

python scripts/compile_kernels.py [op …]     prints a row a specimen; without an op all of them
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

PACKAGE = "autotune.runtimes.native.kernels"
KERNELS = Path(__file__).parents[1].joinpath(*PACKAGE.split("."))
SM80 = GPUTarget("cuda", 80, 32)
SHARED = 163 * 1024
"""Bytes of shared memory that a block may ask for on compute capability 8.0: 164 KB a multiprocessor, 1 KB reserved
(CUDA C++ Programming Guide, technical specifications per compute capability)."""


@dataclass(frozen=True, slots=True)
class Specimen:
    """A kernel with the types, constants and options that it is compiled with.

    A pointer is taken to be aligned to 16 bytes, as torch's allocations are; an integer type may end in ``:16``
    (known to be a multiple) or ``:1`` (known to be one), as Triton would specialize a launch.
    """

    op: str
    function: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, int]

    def compile(self) -> CompiledKernel:
        hints = {name: kind.partition(":")[2] for name, kind in self.types.items()}
        constants = {**self.constants, **{name: 1 for name, hint in hints.items() if hint == "1"}}
        signature = {name: kind.partition(":")[0] for name, kind in self.types.items()}
        signature |= dict.fromkeys(constants, "constexpr")
        missing = [name for name in self.function.arg_names if name not in signature]
        if missing or len(signature) != len(self.function.arg_names):
            raise SystemExit(f"{self.op}: {self.name} takes {self.function.arg_names}, the specimen has {[*signature]}")
        aligned = [name for name, kind in self.types.items() if kind.startswith("*") or hints[name] == "16"]
        attributes = {(self.function.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
        ordered = {name: signature[name] for name in self.function.arg_names}
        source = ASTSource(fn=self.function, signature=ordered, constexprs=constants, attrs=attributes)
        return triton.compile(source, target=SM80, options=dict(self.options))

    @property
    def name(self) -> str:
        return str(self.function.__name__)

    @property
    def label(self) -> str:
        """The constants and the element types, short."""
        words = [f"{name}={getattr(value, 'name', value)}" for name, value in self.constants.items()]
        return " ".join([*words, *dict.fromkeys(kind[1:] for kind in self.types.values() if kind.startswith("*"))])


@dataclass(frozen=True, slots=True)
class Row:
    """What came out of one specimen. Registers and spilled bytes are None where no assembler ran."""

    specimen: Specimen
    shared: int
    warps: int
    stages: int
    registers: int | None
    spilled: int | None
    wrong: str

    @property
    def cells(self) -> tuple[str, ...]:
        numbers = (self.shared, self.warps, self.stages, self.registers, self.spilled)
        name = f"{self.specimen.op}.{self.specimen.name}"
        return name, self.specimen.label, *("-" if n is None else str(n) for n in numbers), self.wrong


def specimens(names: list[str]) -> Iterator[Specimen]:
    """Those of ``kernels/<op>/triton.py`` for the named ops, or for all."""
    found = sorted(path.parent.name for path in KERNELS.glob("*/triton.py"))
    unknown = sorted(set(names) - set(found))
    if unknown:
        raise SystemExit(f"no kernel is called {', '.join(unknown)}; there are {', '.join(found)}")
    for op in names or found:
        module = importlib.import_module(f"{PACKAGE}.{op}.triton")
        if not getattr(module, "SPECIMENS", None):
            raise SystemExit(f"{module.__name__} has no SPECIMENS: add the sizes that the model runs it at")
        for function, types, constants, options in module.SPECIMENS:
            yield Specimen(op, function, types, constants, options)


def examine(specimen: Specimen, limit: int) -> Row:
    compiled = specimen.compile()
    meta, ptx = compiled.metadata, compiled.asm["ptx"]
    target = re.search(r"^\.target (\S+)", ptx, re.MULTILINE)
    wrong = ""
    if target is None or target[1].split(",")[0] != "sm_80":
        wrong = f"PTX is for {target[1] if target else 'nothing'}"
    elif meta.shared > limit:
        wrong = f"asks for {meta.shared - limit} bytes of shared memory too many"
    registers, spilled = resources(compiled.asm.get("cubin"))
    return Row(specimen, meta.shared, meta.num_warps, meta.num_stages, registers, spilled, wrong)


def resources(cubin: bytes | None) -> tuple[int | None, int | None]:
    """Registers a thread and bytes of stack a thread, as Triton's own copy of cuobjdump reads them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if cubin is None or not tool.is_file():
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (None, None)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("op", nargs="*", help="a folder of the kernels' package; all without one")
    parser.add_argument("--first", action="store_true", help="only the first specimen of each kernel")
    parser.add_argument("--shared", type=int, default=SHARED, metavar="BYTES", help="the limit (default %(default)s)")
    asked = parser.parse_args()
    chosen = list(specimens(asked.op))
    if asked.first:
        chosen = list({(one.op, one.name): one for one in reversed(chosen)}.values())[::-1]
    rows = [examine(specimen, asked.shared) for specimen in chosen]
    head = ("kernel", "specimen", "shared bytes", "warps", "stages", "registers", "stack bytes", "")
    table = [head, *(row.cells for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(head))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    wrong = [row for row in rows if row.wrong]
    print(f"{len(rows)} specimens for {SM80.backend} sm_{SM80.arch}, Triton {triton.__version__}: {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
