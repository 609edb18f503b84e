"""All help pages are one golden file; each ends with an example."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from autotune.cli import COMMANDS, main


def _pages() -> Iterator[tuple[str, ...]]:
    """The words of every page: the program, its commands, and the commands of groups."""
    yield ()
    for name in COMMANDS:
        yield (name,)
        command = main.get_command(click.Context(main), name)
        if isinstance(command, click.Group):
            yield from ((name, verb) for verb in command.commands)


PAGES = list(_pages())
GOLDEN = Path(__file__).parents[2] / "golden" / "help.txt"


def page(*words: str) -> str:
    result = CliRunner().invoke(main, [*words, "--help"], prog_name="autotune", terminal_width=120)
    assert result.exit_code == 0, result.output
    return result.output


def test_help_pages_match_the_golden_file() -> None:
    pages = "\n".join(f"$ autotune {' '.join(words)}--help\n{page(*words)}" for words in PAGES)
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(pages)
    assert pages == GOLDEN.read_text(), "help changed; run once with UPDATE_GOLDEN=1 and read the difference"


@pytest.mark.parametrize("words", PAGES, ids=" ".join)
def test_each_page_ends_with_an_example(words: tuple[str, ...]) -> None:
    last = page(*words).strip().splitlines()[-1]
    assert last.strip().startswith("Example: autotune")


def test_a_mistyped_command_names_the_nearest() -> None:
    result = CliRunner().invoke(main, ["serch"])
    assert result.exit_code == 2
    assert "Did you mean 'search'?" in result.output
