"""`autotune bits`: what each width of each weight group costs, and the ladder of allocations that a search climbs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from autotune.cli import output

if TYPE_CHECKING:
    from autotune.allocation import Costs

GROUP_COLUMNS = ("group", "width", "weight_bytes", "kl_predicted")
COLUMNS = ("rung", "weight_bytes", "kl_predicted", "kl", "measurements", "bits_vector")
EPILOG = """\b
KL is nats a token from the full-width model, on text apart from the one that quality is scored on: predicted from
one backward pass, and measured on the whole model. Kept in the database: a search with the same model and engine
finds it there. A plan with a bits_vector in its [knobs] searches allocations of your own.

Example: autotune bits
"""


@click.command(epilog=EPILOG)
@click.option("--model", help="Checkpoint folder. [default: the reference model in the package]")
@click.option("--groups", is_flag=True, help="What each width of each weight group costs, instead of the ladder.")
@click.option("--db", help="SQLite file or database URL. [default: the platform's data folder]")
@output.format_option
def bits(groups: bool, form: str, **flags: Any) -> None:
    """Find, for each of a few sizes, the widths of the weights that keep most of the quality."""
    with output.clear_errors():
        from autotune import kernel_search, ladder
        from autotune.cli.search import log_folder, measuring
        from autotune.decision import TuneError
        from autotune.plan import resolve
        from autotune.setting import StoreCache, make_bench, prepare

        plan = resolve(flags, os.environ)
        with measuring(plan) as store:
            setting = prepare(plan, kernel_search.tuned(plan, store))
            why = ladder.possible(setting)
            if why:
                raise TuneError(f"no ladder: {why}", 3)
            bench, cache = make_bench(setting, store, log_folder(setting.scenario.key)), StoreCache(store)
            if groups:
                rows = _groups(ladder.costs(setting, bench, cache))
            else:
                rungs = ladder.build(setting, bench, cache, output.note)
                rows = [
                    {
                        "rung": number, "weight_bytes": rung.weight_bytes, "kl_predicted": rung.kl_predicted,
                        "kl": rung.kl, "measurements": rung.measurements, "bits_vector": rung.vector or "full width",
                    }
                    for number, rung in enumerate(rungs, 1)
                ]  # fmt: skip
        output.emit(rows, list(GROUP_COLUMNS if groups else COLUMNS), form, "bits")


def _groups(costs: Costs) -> list[dict[str, Any]]:
    return [
        {"group": group, "width": width, "weight_bytes": size, "kl_predicted": kl}
        for group, by in costs.items()
        for width, (size, kl) in sorted(by.items())
    ]
