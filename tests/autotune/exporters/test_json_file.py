"""The JSON export: what is rendered is read back, and nothing else is read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from contracts.exporter import ExporterContract, an_export
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autotune.exporters import Exporter, ExportError, exporter
from autotune.exporters.json_file import LARGEST, parse, read
from autotune.stats import Interval, Verdict
from search_spaces import load

GOLDEN = Path(__file__).parents[2] / "golden" / "export.json"

texts = st.text(st.characters(exclude_categories=()), max_size=20)
numbers = st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
tables = st.dictionaries(texts, values, max_size=4)
bounds = st.tuples(numbers | st.just(-math.inf), numbers | st.just(math.inf))


class TestJsonFile(ExporterContract):
    @pytest.fixture
    def exporter(self) -> Exporter:
        return exporter("json")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_what_is_rendered_is_read_back(data: st.DataObject) -> None:
    draw = data.draw
    space = load("native")
    config = space.complete({k.name: draw(st.sampled_from(k.domain.values), k.name) for k in space.knobs})
    assume(not space.broken(config))
    low, high = draw(bounds)
    export = an_export(
        config=dict(config), folder=draw(texts), autotune=draw(texts),
        **{name: draw(tables) for name in ("engine_build", "model", "hardware", "workload", "objective", "effective")},
    )  # fmt: skip
    evidence = replace(
        export.evidence,
        verdict=str(draw(st.sampled_from(Verdict))),
        ratio=Interval(draw(numbers), low, high, draw(st.integers(1, 99))),
        metrics=draw(st.dictionaries(texts, numbers, max_size=3)),
        trials=tuple(draw(st.lists(texts, max_size=3))),
        round=draw(texts),
    )
    export = replace(export, evidence=evidence)
    text = exporter("json").render(export)["best.json"]
    again = parse(text.encode("ascii"), "best.json")
    assert again == export
    assert exporter("json").render(again)["best.json"] == text


def test_the_format_stays_as_it_was_released() -> None:
    assert exporter("json").render(an_export())["best.json"] == GOLDEN.read_text()
    assert read(GOLDEN) == an_export()


def _with(change: Callable[[dict[str, Any]], object]) -> bytes:
    document = json.loads(exporter("json").render(an_export())["best.json"])
    change(document)
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(format="autotune-export/2"), "another version"),
        (lambda d: d.pop("format"), "no autotune export"),
        (lambda d: d.pop("config"), "'config' is missing"),
        (lambda d: d.update(confg={}), "did you mean 'config'"),
        (lambda d: d.update(engine=1), "'engine' must be text"),
        (lambda d: d.update(engine="other"), "unknown engine"),
        (lambda d: d.update(hardware=[]), "'hardware' must be a table"),
        (lambda d: d["config"].update(attention="flash"), "attention cannot be"),
        (lambda d: d["config"].update(bits_experts=4.0), "bits_experts cannot be 4.0"),
        (lambda d: d["config"].update(bits_experts=[4]), "'bits_experts' must be"),
        (lambda d: d["config"].update(bits_expert=4), "did you mean bits_experts"),
        (lambda d: d["config"].pop("attention"), "'attention' is missing"),
        (lambda d: d["config"].update(activations="int8_tensor"), "'activations' means nothing"),
        (lambda d: d["config"].update(tp=2, ep=4), "breaks a rule"),
        (lambda d: d["evidence"].update(verdict="great"), "'evidence.verdict' must be one of"),
        (lambda d: d["evidence"].update(better=""), "'evidence.better'"),
        (lambda d: d["evidence"].update(blocks=True), "'evidence.blocks' must be a whole number"),
        (lambda d: d["evidence"].update(trials=[1]), "'evidence.trials' must be a list of texts"),
        (lambda d: d["evidence"]["metrics"].update(x="1"), "'evidence.metrics' must be a table of numbers"),
        (lambda d: d["evidence"]["metrics"].update(x=10**400), "'evidence.metrics'"),
        (lambda d: d["evidence"]["ratio"].pop("n"), "'evidence.ratio'"),
        (lambda d: d["evidence"]["ratio"].update(mean=None), "'evidence.ratio'"),
    ],
)
def test_a_wrong_part_is_named(change: Callable[[dict[str, Any]], object], words: str) -> None:
    with pytest.raises(ExportError, match=r"best\.json") as caught:
        parse(_with(change), "best.json")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"null", b"\xff\xfe\x00", b"[" * 100_000, b'{"format": "autotune-export/1"}',
        b'{"format": "autotune-export/1", "format": "autotune-export/1"}',
        b'{"format": NaN}', b'{"format": 1e999}', b" " * (LARGEST + 1), b'{"a": ' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
def test_rubbish_is_one_clear_line(data: bytes) -> None:
    with pytest.raises(ExportError) as caught:
        parse(data, "best.json")
    assert "\n" not in str(caught.value)


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ExportError, match="autotune export -o"):
            read(path)
