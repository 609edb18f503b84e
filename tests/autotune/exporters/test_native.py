"""An export runs only on the measured model, and only when the engine says that it runs the measured configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from contracts.exporter import an_export
from contracts.scripted import Scripted

import autotune
from autotune.exporters import ExportError, exporter
from autotune.exporters.native import check_effective, launch, load_export

WANTED = an_export()


@dataclass(frozen=True)
class Facts:
    """A model of a given identity."""

    found: Mapping[str, Any]

    def identity(self) -> Mapping[str, Any]:
        return self.found


class Obedient(Scripted):
    """Says that it runs what it was given, but for ``lies``."""

    lies: Mapping[str, Any] = {}

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = config

    def effective(self) -> Mapping[str, Any]:
        return {**self.config, "backend": ("amx", "avx512"), **self.lies}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("autotune.model.facts", lambda folder: Facts(WANTED.model))
    monkeypatch.setattr("autotune.runtimes.native.engine.Engine", Obedient)
    path = tmp_path / "best.json"
    path.write_text(exporter("json").render(WANTED.at(tmp_path))["best.json"])
    return path


def test_load_runs_exactly_the_export(file: Path) -> None:
    with autotune.load(str(file)) as llm:
        assert dict(llm.config) == dict(WANTED.config)
        assert llm.generate([[1, 2]], max_tokens=3)[0].tokens == (1, 2, 1)


def test_a_moved_model_is_named_and_may_be_given(file: Path, tmp_path: Path) -> None:
    file.write_text(exporter("json").render(WANTED.at(tmp_path / "gone"))["best.json"])
    with pytest.raises(ExportError, match="gone; give its folder with --model"):
        load_export(file)
    load_export(file, tmp_path).close()


def test_another_model_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.model.facts", lambda folder: Facts({**WANTED.model, "weights": "sha256:ff"}))
    with pytest.raises(ExportError, match=r"not the measured one \(weights differ\)"):
        load_export(file)


def test_an_engine_that_runs_something_else_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Obedient, "lies", {"backend": ["reference"]})
    with pytest.raises(ExportError, match="measured on 2-core CPU: backend is"):
        load_export(file)


@pytest.mark.parametrize(
    ("measured", "found", "wrong"),
    [
        (WANTED.effective, WANTED.effective, ""),
        ({}, {**WANTED.config, "anything": 1}, ""),
        ({}, {**WANTED.config, "attention": "expanded"}, "attention is 'expanded' instead of 'sparse'"),
        (WANTED.effective, {**WANTED.config}, "backend is None instead of"),
        (WANTED.effective, {**WANTED.effective, "more": 1}, "more is 1 instead of None"),
        ({**WANTED.effective, "attention": "expanded"}, {**WANTED.effective, "attention": "expanded"}, "'sparse'"),
        ({**WANTED.effective, "attention": "expanded"}, WANTED.effective, "instead of 'expanded'"),
    ],
)
def test_what_is_effective_is_compared_whole(measured: Any, found: Any, wrong: str) -> None:
    export = an_export(effective=measured)
    if not wrong:
        check_effective(export, found)
        return
    with pytest.raises(ExportError, match=wrong):
        check_effective(export, found)


def test_another_engine_has_its_own_server(file: Path) -> None:
    with pytest.raises(ExportError, match="--to shell"):
        launch(replace(WANTED.at(file.parent), engine="other"))
