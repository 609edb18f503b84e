"""What every exporter must do: an implementation supplies the fixture ``exporter`` and is done."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autotune.exporters import Evidence, Export, Exporter, ExportError
from autotune.stats import Interval
from search_spaces import load

HOSTILE = "a'b\"c$(touch x)`id`\\\n# \r\t×\u202e\udcff\x1b[31m\x7f\x85\u2028 --set x=1"


def an_export(**changes: Any) -> Export:
    """An export of the native engine; ``changes`` replace its parts."""
    config = load("native").complete({"attention": "sparse", "bits_experts": 4, "prefix_reuse": True})
    evidence = Evidence(
        verdict="better",
        metric="output_tok_s",
        better="higher",
        ratio=Interval(1.25, 1.125, 1.5, 7),
        metrics={"output_tok_s": 500.0, "kl_mean": 0.0125},
        default_metrics={"output_tok_s": 400.0},
        blocks=7,
        trials=("0000000000000000000a", "0000000000000000000b"),
        round="r1:0123456789ab",
        measured_at="2026-01-02T03:04:05+00:00",
    )
    export = Export(
        engine="native",
        engine_build={"torch": "2.9", "source": "abc"},
        model={"name": "reference", "weights": "sha256:00"},
        folder="/models/reference",
        hardware={"key": "h1:00", "label": "2-core CPU", "kind": "cpu", "facts": {"cores": 2, "mig": None}},
        workload={"name": "task", "turns": [1, 4]},
        objective={"metric": "output_tok_s", "better": "higher"},
        config=dict(config),
        effective={**config, "backend": ["amx", "avx512"]},
        evidence=evidence,
        autotune="0.1.0",
    )
    return replace(export, **changes)


class ExporterContract:
    """Subclass it with a fixture ``exporter``."""

    @pytest.fixture
    def exporter(self) -> Exporter:
        raise NotImplementedError

    def test_is_pure_and_gives_plain_file_names(self, exporter: Exporter) -> None:
        first, second = exporter.render(an_export()), exporter.render(an_export())
        assert first == second
        assert first
        for name, text in first.items():
            assert name and "/" not in name and not name.startswith(".")
            assert text.endswith("\n")

    def test_says_every_value_of_the_configuration(self, exporter: Exporter) -> None:
        export = an_export()
        whole = "".join(exporter.render(export).values())
        for name in export.config:
            assert name in whole
        changed = replace(export, config={**export.config, "kda_chunk": 16})
        assert exporter.render(changed) != exporter.render(export)

    def test_hostile_text_makes_no_extra_line(self, exporter: Exporter) -> None:
        def lines(text: str) -> int:
            export = an_export(model={"name": text}, hardware={"label": text, "key": text}, autotune=text)
            evidence = replace(export.evidence, round=text, measured_at=text, metrics={text: 1.0})
            rendered = exporter.render(replace(export, evidence=evidence))
            return sum(len(file.splitlines()) for file in rendered.values())

        assert lines(HOSTILE) == lines("plain")

    def test_an_unmeasured_bound_is_no_crash(self, exporter: Exporter) -> None:
        export = an_export()
        evidence = replace(export.evidence, ratio=Interval(1.0, 0.0, float("inf"), 1))
        assert exporter.render(replace(export, evidence=evidence))

    def test_what_the_format_cannot_say_is_refused(self, exporter: Exporter) -> None:
        for export in (an_export(config={"attention": float("nan")}), an_export(config={"attention": "a\0b"})):
            try:
                assert exporter.render(export)
            except ExportError as error:
                assert str(error)
