"""The `autotune` command: finds and loads the module of one verb at a time, so that --help stays light."""

from __future__ import annotations

import importlib

import click

from autotune import __version__

COMMANDS = {
    "search": "autotune.cli.search",
    "query": "autotune.cli.query",
    "show": "autotune.cli.query",
    "effects": "autotune.cli.effects",
    "db": "autotune.cli.db",
    "export": "autotune.cli.export",
    "serve": "autotune.cli.export",
    "capacity": "autotune.cli.capacity",
    "bits": "autotune.cli.bits",
    "space": "autotune.cli.space",
    "probe": "autotune.cli.space",
}

EPILOG = """\b
Exit codes: 0 done · 1 our or the engine's failure · 2 wrong usage ·
3 nothing to answer · 124 time spent before a first result · 130 interrupted, results kept.

Example: autotune search --budget 200
"""


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        return getattr(importlib.import_module(COMMANDS[name]), name)  # type: ignore[no-any-return]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        from difflib import get_close_matches

        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = get_close_matches(args[0], COMMANDS, 1) if args else []
            if near:
                raise click.UsageError(f"{error.message} Did you mean {near[0]!r}?", ctx) from None
            raise


@click.group(cls=_Lazy, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="autotune")
def main() -> None:
    """Find the best serving configuration of a model on this hardware, by measuring it on the real engine."""
