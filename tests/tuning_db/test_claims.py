"""Who is gone: only a process of this machine that has ended for sure."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tuning_db.claims import is_gone, me


def test_this_process_is_here():
    assert not is_gone(me())


@pytest.mark.parametrize("place", [0, 1])
def test_a_process_of_another_machine_or_container_is_never_gone(place):
    parts = me().split("/")
    parts[2] = str(2**22 + 1)  # no such process here
    assert is_gone("/".join(parts))
    parts[place] = "other"
    assert not is_gone("/".join(parts))


def test_a_process_that_took_over_the_number_of_another_is_not_it():
    parts = me().split("/")
    assert parts[2] == str(os.getpid())
    parts[3] = str(int(parts[3]) - 1)
    assert is_gone("/".join(parts))


def test_an_ended_process_is_gone_even_before_its_parent_has_looked():
    code = "from tuning_db.claims import me; print(me(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        owner = child.stdout.readline().strip()
        assert not is_gone(owner)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert is_gone(owner)


@pytest.mark.parametrize("owner", ["", "/", "a/b/c/d", "///"])
def test_an_owner_of_another_form_is_never_gone(owner):
    assert not is_gone(owner)
