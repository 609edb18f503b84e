"""The shape of the code: who may import whom, and how large a file or function may grow."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path
    for folder in ("autotune", "search_spaces", "tuning_db", "scripts", "tests")
    for path in (ROOT / folder).rglob("*.py")
)
LAYERS = (
    ("__main__",),
    ("cli",),
    ("offer",),
    ("ladder",),
    ("effects", "kernel_search"),
    ("setting", "tune", "report", "exporters", "optuna_study"),
    ("decision", "hints", "race", "guards", "endings", "engines", "sharing", "record"),
    ("plan", "sampler", "pool", "bench", "kernel_bench", "judge"),
    ("quality", "loadgen", "telemetry", "infeasible", "launches"),
    ("memory",),
    ("runtimes",),
    ("objective", "pruning", "capacity"),
    ("outcome", "slo", "stopping"),
    ("hardware", "model", "workload", "metrics", "corpus", "stats", "catalogue"),
)
HEAVY = {"torch", "optuna", "sqlalchemy", "transformers", "triton", "ray", "alembic"}
# `optuna_study` only writes files for Optuna's own tools; the study that searches stays in `sampler`.
HOMES = {"optuna": ("sampler", "optuna_study"), "ray": ("pool",), "torch": ("runtimes",), "triton": ("runtimes",)}


def level(module: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if module in names)


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


@pytest.mark.parametrize("leaf", ["search_spaces", "tuning_db"])
def test_leaves_import_nothing_of_ours(leaf: str) -> None:
    ours = {"autotune", "search_spaces", "tuning_db"} - {leaf}
    for path in (ROOT / leaf).rglob("*.py"):
        assert not {name.split(".")[0] for name in imports(path)} & ours, path


def test_modules_import_only_from_lower_lines() -> None:
    wrong = []
    for path in (ROOT / "autotune").rglob("*.py"):
        parts = path.relative_to(ROOT / "autotune").with_suffix("").parts
        if parts[0] == "__init__":
            continue
        for name in imports(path):
            pieces = name.split(".")
            if pieces[0] == "autotune" and len(pieces) > 1 and (pieces[1] != parts[0]):
                known = any(pieces[1] in names for names in LAYERS)
                if known and level(pieces[1]) <= level(parts[0]):
                    wrong.append(f"{'/'.join(parts)} imports {name}")
    assert not wrong


def test_heavy_libraries_stay_at_home() -> None:
    for path in (ROOT / "autotune").rglob("*.py"):
        top = path.relative_to(ROOT / "autotune").with_suffix("").parts[0]
        for library, homes in HOMES.items():
            if top not in homes:
                assert library not in {name.split(".")[0] for name in imports(path)}, f"{path} imports {library}"
        assert "transformers" not in {name.split(".")[0] for name in imports(path)}, path


def test_search_spaces_is_standard_library_only() -> None:
    for path in (ROOT / "search_spaces").rglob("*.py"):
        tops = {name.split(".")[0] for name in imports(path)}
        assert tops <= {*sys.stdlib_module_names, "search_spaces"}, path


def test_help_loads_no_heavy_library() -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom autotune.cli import main\n"
        "assert CliRunner().invoke(main, ['--help']).exit_code == 0\n"
        "print(' '.join({name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & HEAVY, f"{loaded & HEAVY} are loaded by --help"
    assert "click" in loaded


def test_files_and_functions_stay_small() -> None:
    large = []
    for path in SOURCES:
        text = path.read_text()
        if text.count("\n") > 400:
            large.append(f"{path.relative_to(ROOT)}: {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or 0) - node.lineno + 1
                arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                count = len([a for a in arguments if a not in ("self", "cls")])
                if lines >= 60 or (count > 7 and not _interface(node)):
                    large.append(f"{path.relative_to(ROOT)}:{node.name}: {lines} lines, {count} parameters")
    assert not large


def _interface(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A command's parameters are its options; a Triton function's are its pointers, sizes and strides."""
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any("click" in text or text == "triton.jit" for text in decorators)


def test_every_module_says_what_it_knows() -> None:
    missing = [
        path.relative_to(ROOT)
        for path in SOURCES
        if path.parts[-2] != "versions" and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not missing
