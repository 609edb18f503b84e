"""No process, port or memory of a launch outlives it, and nothing else is ever touched."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from contracts import fake_vllm
from contracts.runtime import PROMPT, collect, run

from autotune.outcome import EngineError, Status
from autotune.runtimes.base import Generation
from autotune.runtimes.server import ready
from autotune.runtimes.server.process import Kept
from autotune.runtimes.server.runtime import ServerRuntime
from search_spaces import load

SPACE = load("vllm", "cpu")
DEFAULT = SPACE.default()


def failed(runtime: ServerRuntime, log: Path) -> EngineError:
    """How a launch that cannot succeed ends."""
    with pytest.raises(EngineError) as caught, runtime.launch(DEFAULT, log):
        pass
    return caught.value


def gone(pids: list[int]) -> bool:
    return all(" Z " in fake_vllm.stat(pid) for pid in pids)


def holders(ledger: Path) -> list[int]:
    return [int(entry.name) for entry in ledger.iterdir() if entry.name.isdigit()]


def test_a_worker_that_detached_itself_dies_with_its_server(serve, ledger: Path, tmp_path: Path) -> None:
    runtime = serve({"do": "fork"})
    for name in "ab":  # the second launch finds the memory free
        with runtime.launch(DEFAULT, tmp_path / f"{name}.log"):
            assert fake_vllm.held(ledger) == 2 * fake_vllm.HELD
        assert gone(holders(ledger)) and fake_vllm.held(ledger) == 0


def test_a_killed_server_takes_its_workers_along_at_once(serve, ledger: Path, tmp_path: Path) -> None:
    """vLLM's API server killed: its workers live on and hold the device unless somebody ends them."""
    with serve({"do": "fork"}).launch(DEFAULT, tmp_path / "a.log") as endpoint:
        server = next(p for p in endpoint._kept.tree() if fake_vllm.__file__ in p.cmdline() and "serve" in p.cmdline())
        main = min(holders(ledger))
        assert server.pid in holders(ledger)
        os.kill(main, signal.SIGKILL)
        end = time.monotonic() + 10
        while not gone(holders(ledger)) and time.monotonic() < end:
            time.sleep(0.02)
        assert gone(holders(ledger))
        with pytest.raises(EngineError) as caught:
            run(endpoint, collect(endpoint, Generation(PROMPT, 3)))
        assert caught.value.phase == "measure" and caught.value.failure == "oom_request"


def test_a_start_that_ignores_its_end_is_killed_in_time(serve, ledger: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    runtime = serve({"do": "deaf"}, {"do": "fork"}, {"do": "slow", "seconds": 60}, launch=0.6, grace=0.3)
    found = failed(runtime, tmp_path / "a.log")
    assert "not ready after 0.6 s" in found.reason
    assert found.status is Status.TIMEOUT and found.failure == "startup_timeout"
    assert time.monotonic() - began < 15 and gone(holders(ledger))


def test_a_crash_at_the_start_is_noticed_at_once_with_the_end_of_its_log(serve, tmp_path: Path) -> None:
    began = time.monotonic()
    runtime = serve({"do": "exit", "text": "RuntimeError: the flux broke", "code": 7}, launch=60)
    found = failed(runtime, tmp_path / "a.log")
    assert re.search(r"the flux broke", str(found))
    assert found.status is Status.CRASH and "RuntimeError: the flux broke" in found.tail
    assert time.monotonic() - began < 15
    text = (tmp_path / "a.log").read_text()
    assert "--max-num-seqs 128" in text.splitlines()[0] and "RuntimeError: the flux broke" in text


def test_a_command_that_is_not_there_is_named(serve, tmp_path: Path) -> None:
    runtime = serve()
    runtime.prefix = ("/no/such/vllm",)
    found = failed(runtime, tmp_path / "a.log")
    assert re.search(r"/no/such/vllm: No such file", str(found))
    assert found.status is Status.UNSUPPORTED


def test_the_next_launch_waits_until_the_memory_is_back(serve, ledger: Path, tmp_path: Path) -> None:
    runtime = serve({"do": "leak", "seconds": 1.5})
    with runtime.launch(DEFAULT, tmp_path / "a.log"):
        pass
    assert fake_vllm.held(ledger) > 0
    with runtime.launch(DEFAULT, tmp_path / "b.log"):
        assert len([pid for pid in holders(ledger) if psutil.pid_exists(pid)]) == 1


def test_memory_that_never_comes_back_is_the_machines_fault(serve, ledger: Path, tmp_path: Path) -> None:
    runtime = serve({"do": "leak", "seconds": 600}, patience=0.1)
    with runtime.launch(DEFAULT, tmp_path / "a.log"):
        pass
    found = failed(runtime, tmp_path / "b.log")
    assert re.search(r"1024 MiB more are in use", str(found))
    assert found.status is Status.BUSY and not (tmp_path / "b.log").exists()


def test_a_device_that_others_hold_is_tried_once_more(serve, ledger: Path, tmp_path: Path) -> None:
    text = (
        "ValueError: Free memory on device cuda:0 (1.2/79.1 GiB) on startup is less than desired GPU memory utilization"
    )
    with serve({"do": "exit", "text": text, "times": 1}).launch(DEFAULT, tmp_path / "a.log"):
        pass
    found = failed(serve({"do": "exit", "text": text, "times": 99}), tmp_path / "b.log")
    assert re.search(r"busy_device: .*Free memory", str(found))
    assert found.status is Status.BUSY


def test_a_wanted_port_is_ours_or_another_is_taken(serve, tmp_path: Path) -> None:
    free = ready.free_port()
    with serve(port=free).launch(DEFAULT, tmp_path / "a.log") as endpoint:
        assert endpoint.base.endswith(f":{free}")
        with serve(port=free).launch(DEFAULT, tmp_path / "b.log") as second:
            assert second.base != endpoint.base


def test_a_foreign_server_on_the_port_is_never_measured(serve, tmp_path: Path, monkeypatch) -> None:
    """It was free when we looked: the other server answers before ours, or ours cannot bind."""
    decoy = serve()
    with decoy.launch(DEFAULT, tmp_path / "decoy.log") as other:
        port = int(other.base.rsplit(":", 1)[1])
        monkeypatch.setattr(ready, "free_port", lambda wanted=0: port)
        found = failed(serve({"do": "slow", "seconds": 5}), tmp_path / "a.log")
        assert re.search(rf"port: .*port {port}", str(found))
        assert found.status is Status.BUSY
        assert failed(serve(), tmp_path / "b.log").failure == "port"
        monkeypatch.undo()
        assert run(other, collect(other, Generation(PROMPT, 1)))


def test_no_port_stays_taken(serve, tmp_path: Path) -> None:
    with serve({"do": "fork"}).launch(DEFAULT, tmp_path / "a.log") as endpoint:
        port = int(endpoint.base.rsplit(":", 1)[1])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        assert probe.getsockname()[1] == port


OWNER = """
import sys, time
from pathlib import Path
from autotune.runtimes.server.process import Kept
from autotune.runtimes.server.runtime import ServerRuntime
kept = Kept(sys.argv[1:], Path(sys.argv[1] + ".log"), {}, grace=0.3)
time.sleep(600)
"""


def test_a_shell_in_the_tuners_own_group_survives_the_end_of_a_trial(tmp_path: Path, ledger: Path) -> None:
    script = tmp_path / "engine"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -S {fake_vllm.__file__} serve x --port {ready.free_port()}\n")
    script.chmod(0o755)
    ended = OWNER.replace("time.sleep(600)", "time.sleep(0.5)\nkept.stop()")
    done = subprocess.run(
        ["sh", "-c", '"$0" -c "$1" "$2"; echo "the shell goes on after code $?"', sys.executable, ended, str(script)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout == "the shell goes on after code 0\n", done.stderr
    assert gone(holders(ledger))


def test_a_killed_tuner_leaves_no_server(ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAULTS", '[{"do": "fork"}, {"do": "deaf"}]')
    script = tmp_path / "engine"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -S {fake_vllm.__file__} serve x --port {ready.free_port()}\n")
    script.chmod(0o755)
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(script)])
    end = time.monotonic() + 30
    while len(holders(ledger)) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    owner.kill()
    owner.wait()
    while not gone(holders(ledger)) and time.monotonic() < end:
        time.sleep(0.05)
    assert len(holders(ledger)) == 2 and gone(holders(ledger))


def test_a_killed_keeper_leaves_no_server(ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAULTS", '[{"do": "fork"}]')
    command = [sys.executable, "-S", fake_vllm.__file__, "serve", "x", "--port", str(ready.free_port())]
    kept = Kept(command, tmp_path / "a.log", {}, grace=0.3)
    end = time.monotonic() + 20
    while len(holders(ledger)) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    assert len(kept.tree()) == 2
    kept._keeper.kill()
    assert kept.stop() == []
    assert gone(holders(ledger))
