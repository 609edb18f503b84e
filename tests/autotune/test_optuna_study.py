"""A scenario written as an Optuna storage: what Optuna reads from it, and what a browser shows of it."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from wsgiref.simple_server import WSGIRequestHandler, make_server

import optuna
import pytest
from contracts.records import HOSTILE, make_scenario, make_trial
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from autotune.objective import Objective
from autotune.optuna_study import write
from tuning_db import StoreError, Trial

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome", "chrome")
SCENARIO = make_scenario(objective={"metric": "output_tok_s", "better": "higher"})
STATUSES = ["ok"] * 9 + ["oom", "pruned", "quality"]


def trials() -> list[Trial]:
    made = []
    for step, status in enumerate(STATUSES):
        config = {"kv_dtype": ("int8", "bf16")[step % 2], "max_seqs": 2 ** (step % 5), "share": 0.25 * (step % 3 + 1)}
        config |= {"graphs": step > 4, "mixed": (None, 1, "1", True)[step % 4], "only": 8}
        config |= {"batch": step + 1} if step > 4 else {}
        made.append(
            make_trial(
                SCENARIO.key,
                config=config,
                status=status,
                reason="" if status == "ok" else HOSTILE * 200,
                metrics={"output_tok_s": 100.0 + step, "ttft_p50": 0.5 - step / 100} if status == "ok" else {},
                started_at=1.7e9 + step,
                ended_at=1.7e9 + step + 0.5,
                stage="search" if step < 8 else "confirm",
            )
        )
    return made


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("optuna") / "glm's & study.db"
    assert write(path, "glm <b>😀</b>", SCENARIO, trials(), Objective("output_tok_s")) == len(STATUSES)
    return path


@pytest.fixture(scope="module")
def study(file: Path) -> optuna.Study:
    return optuna.load_study(study_name="glm <b>😀</b>", storage=f"sqlite:///{file}")


def test_values_states_and_times_are_those_of_the_trials(study: optuna.Study) -> None:
    assert study.direction == optuna.study.StudyDirection.MAXIMIZE
    assert study.metric_names == ["output_tok_s"]
    states = {"ok": TrialState.COMPLETE, "pruned": TrialState.PRUNED}
    assert [trial.state for trial in study.trials] == [states.get(status, TrialState.FAIL) for status in STATUSES]
    assert study.best_value == 108.0
    for read, made in zip(study.trials, trials(), strict=True):
        assert read.datetime_start is not None and read.datetime_start.timestamp() == made.started_at
        assert read.duration is not None and read.duration.total_seconds() == 0.5


def test_knobs_have_the_distribution_that_their_values_call_for(study: optuna.Study) -> None:
    first, last = study.trials[0], study.trials[-1]
    assert last.distributions == {
        "kv_dtype": CategoricalDistribution(("bf16", "int8")),
        "max_seqs": IntDistribution(1, 16, log=True),
        "share": FloatDistribution(0.25, 0.75),
        "graphs": CategoricalDistribution((False, True)),
        "mixed": CategoricalDistribution(('"1"', "1", "null", "true")),
        "only": CategoricalDistribution(("8",)),
        "batch": IntDistribution(6, 12),
    }
    assert first.params == {
        "kv_dtype": "int8", "max_seqs": 1, "share": 0.25, "graphs": False, "mixed": "null", "only": "8"
    }  # fmt: skip


def test_attributes_tell_what_else_is_known(study: optuna.Study) -> None:
    good, failed = study.trials[3], study.trials[9]
    assert good.user_attrs["ttft_p50"] == 0.47
    assert good.user_attrs["stage"] == "search"
    assert good.user_attrs["seconds.launch"] == 1.5
    assert failed.user_attrs["status"] == "oom"
    assert failed.user_attrs["reason"].startswith(HOSTILE)
    assert study.user_attrs["scenario_key"] == SCENARIO.key


def test_several_metrics_make_a_study_of_several_objectives(tmp_path: Path) -> None:
    path = tmp_path / "two.db"
    write(path, "two", SCENARIO, trials()[:4], Objective("output_tok_s,ttft_p50"))
    study = optuna.load_study(study_name="two", storage=f"sqlite:///{path}")
    assert [way.name for way in study.directions] == ["MAXIMIZE", "MINIMIZE"]
    assert [trial.values for trial in study.best_trials] == [[103.0, 0.47]]


def test_a_file_that_is_there_is_never_touched(file: Path) -> None:
    before = file.read_bytes()
    with pytest.raises(StoreError, match="is there already"):
        write(file, "other", SCENARIO, [], Objective("output_tok_s"))
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    with pytest.raises(StoreError, match="cannot write"):
        write(file.parent / "none" / "x.db", "other", SCENARIO, [], Objective("output_tok_s"))


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Leave the test's output alone."""


@pytest.fixture(scope="module")
def address(file: Path) -> Iterator[str]:
    dashboard = pytest.importorskip("optuna_dashboard", reason="needs `pip install optuna-dashboard`")
    application = dashboard.wsgi(optuna.storages.RDBStorage(f"sqlite:///{file}"))
    with make_server("127.0.0.1", 0, application, handler_class=_Quiet) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/dashboard/studies/1"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("page", "shows"),
    [
        ("", ["glm &lt;b&gt;😀&lt;/b&gt;", "Best Trial (number=8)", "Hyperparameter Importance", "output_tok_s"]),
        ("/trials?numbers=9", ["Trial 9", "Fail", "kv_dtype", "max_seqs 16", "status oom"]),
    ],
)
def test_a_browser_opens_the_study_in_the_dashboard(address: str, tmp_path: Path, page: str, shows: list[str]) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"needs a browser: one of {', '.join(BROWSERS)}, such as `apt-get install chromium-headless-shell`")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom"]
    # Time inside the page jumps over every wait for a timer, but not over one for the server.
    command += [f"--user-data-dir={tmp_path}", "--virtual-time-budget=20000", address + page]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    for text in shows:
        assert text in dom, dom[-3000:]
