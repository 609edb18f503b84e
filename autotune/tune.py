"""The study: search, then confirm. Writes each trial as it ends and resumes from rows alone; prints nothing."""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune import __version__, stats
from autotune.bench import Measuring
from autotune.objective import Objective
from autotune.outcome import EngineError, Outcome, Status
from autotune.sampler import Sampler
from search_spaces import Config
from tuning_db import Sample, Scenario, Store, Trial, host_digest, new_id

FREE_LIMIT = 20
"""Endings in a row that say nothing about a configuration (port taken, device busy) before the study gives up."""


class TuneError(Exception):
    """A study that cannot go on. ``code`` is the command's exit code: 1 the machine's fault, 3 nothing to answer."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Study:
    """What a study wants: ``budget`` counted search trials, then ``blocks`` interleaved blocks of ``finalists``."""

    scenario_key: str
    objective: Objective
    budget: int
    seed: int = 0
    finalists: int = 5
    blocks: int = 7


@dataclass(frozen=True, slots=True)
class Result:
    """The decision with the rows behind it. ``config`` is what to deploy."""

    winner: stats.Winner
    config: Config
    default: Config
    round: str
    trials: tuple[Trial, ...]


class Tuner:
    """Runs one study on one bench against one store."""

    def __init__(self, study: Study, bench: Measuring, store: Store) -> None:
        self.study, self.bench, self.store = study, bench, store
        self.space = bench.space

    def search(self) -> Iterator[Trial]:
        """Measure until ``budget`` counted trials exist, yielding each new one after it is stored.

        Raises TuneError when the default fails, or when the machine keeps failing.
        """
        sampler = Sampler(self.space, self.study.budget, self.study.seed)
        done = self.stored("search")
        for trial in done:
            self._learn(sampler, trial)
        counted, free = len(done), 0
        if counted < self.study.budget:
            self._reference()
        while counted < self.study.budget:
            _needs_default(done, self.space.default())
            asked = time.monotonic()
            config = sampler.ask()
            if config is None:
                return
            tuner_seconds = time.monotonic() - asked
            outcome = self.bench.measure(config, self.study.seed, name=config.key[3:11])
            trial = self._trial("search", config, outcome, 0, tuner_seconds)
            self.store.add(trial, _samples(trial.id, outcome))
            yield trial
            if not outcome.counted:
                free += 1
                if free >= FREE_LIMIT:
                    raise TuneError(
                        f"{free} launches in a row failed for outside reasons, the last: {outcome.reason}", 1
                    )
                continue
            counted, free = counted + 1, 0
            self._learn(sampler, trial)
            done.append(trial)

    def _reference(self) -> None:
        """Score the quality reference before anything is judged by it, so that no trial pays or fails for it."""
        if self.bench.quality is None:
            return
        try:
            self.bench.quality.reference()
        except EngineError as error:
            raise TuneError(
                f"the full-width model, the reference of the quality gate, could not be scored: {error}\n{error.tail}",
                3,
            ) from None

    def finalists(self) -> list[Config]:
        """The best feasible configurations of the search, best first, without the default."""
        default = self.space.default()
        good = [
            (value, trial.config_key, trial)
            for trial in self.stored("search")
            if trial.status == Status.OK and trial.config_key != default.key
            if (value := self.study.objective.goodness(trial.metrics)) is not None
        ]
        good.sort(key=lambda row: (-row[0], row[1]))
        return [Config(trial.config) for _, _, trial in good[: self.study.finalists]]

    def confirm(self) -> Iterator[Trial]:
        """Re-measure the finalists interleaved with the default in random order, a fresh launch each time.

        From the fourth block on, a finalist that is worse than the leader in a one-sided paired Wilcoxon test
        (p < 0.1, the least that four pairs can show) is dropped.
        """
        finalists = self.finalists()
        if not finalists:
            return
        yield from self.interleave("confirm", [self.space.default(), *finalists], self.study.blocks, self._alive)

    def interleave(
        self,
        stage: str,
        contenders: Sequence[Config],
        blocks: int,
        alive: Callable[[str, Sequence[Config], int], Sequence[Config]] = lambda name, contenders, block: contenders,
    ) -> Iterator[Trial]:
        """Measure ``contenders`` once a block, in an order drawn anew for each, on the same prompts within a block.

        Goes on where an earlier, interrupted call with the same contenders stopped. ``alive`` may drop some.
        """
        name = round_name(contenders)
        for block in range(1, blocks + 1):
            rows = self.stored(stage)
            have = {t.config_key for t in rows if t.provenance.get("round") == name and t.block == block}
            order = list(alive(name, contenders, block))
            random.Random(f"{self.study.seed}/{block}").shuffle(order)
            for config in order:
                if config.key not in have:
                    yield self._repeat(stage, config, block, {"round": name, "default": contenders[0].key})

    def _repeat(self, stage: str, config: Config, block: int, about: Mapping[str, str]) -> Trial:
        for _ in range(3):
            outcome = self.bench.measure(config, self.study.seed + block, name=f"{config.key[3:11]}-{block}")
            if outcome.counted:
                break
        trial = self._trial(stage, config, outcome, block, 0.0)
        trial = replace(trial, provenance={**trial.provenance, **about})
        self.store.add(trial, _samples(trial.id, outcome))
        return trial

    def _alive(self, name: str, contenders: Sequence[Config], block: int) -> Sequence[Config]:
        values = self._values(name, before=block)
        default, finalists = contenders[0], list(contenders[1:])
        if block < 5:
            return contenders
        full = [c for c in finalists if len(values.get(c.key, {})) == block - 1]
        if not full:
            return [default]
        leader = max(full, key=lambda c: sum(values[c.key].values()))
        kept = [
            c
            for c in full
            if c == leader or stats.signed_rank([values[leader.key][b] - v for b, v in values[c.key].items()]) >= 0.1
        ]
        return [default, *kept]

    def _values(self, name: str, before: int = 10**9) -> dict[str, dict[int, float]]:
        """{config key: {block: goodness}} of one confirmation round."""
        found: dict[str, dict[int, float]] = {}
        for trial in self.stored("confirm"):
            value = self.study.objective.goodness(trial.metrics)
            mine = trial.provenance.get("round") == name and trial.block < before and trial.status == Status.OK
            if mine and value is not None:
                found.setdefault(trial.config_key, {})[trial.block] = value
        return found

    def result(self) -> Result:
        """Decide from the confirming rows. Raises TuneError(code 3) when nothing feasible was found."""
        finalists = self.finalists()
        default = self.space.default()
        if not finalists:
            raise TuneError(
                "no configuration other than the default passed the quality gate; "
                "raise --budget, or loosen --max-kl / --max-perplexity", 3
            )  # fmt: skip
        return decide_rows(self.stored("confirm"), default, round_name([default, *finalists]), self.study.objective)

    def _learn(self, sampler: Sampler, trial: Trial) -> None:
        value = self.study.objective.goodness(trial.metrics)
        violation = 0.0 if trial.status == Status.OK else 1.0
        if trial.status == Status.QUALITY:
            violation = max(self.bench.gate.violation(trial.metrics), 1e-6)
        failed = trial.status not in (Status.OK, Status.QUALITY)
        sampler.tell(Config(trial.config), None if failed else value, violation)

    def stored(self, stage: str) -> list[Trial]:
        """The counted trials of one stage, oldest first."""
        rows = self.store.trials(scenario_key=self.study.scenario_key, stage=stage)
        return [row for row in rows if row.counted]

    def _trial(self, stage: str, config: Config, outcome: Outcome, block: int, tuner: float) -> Trial:
        ended = time.time()
        return Trial(
            id=new_id(),
            scenario_key=self.study.scenario_key,
            stage=stage,
            config=dict(config),
            config_key=config.key,
            status=str(outcome.status),
            reason=outcome.reason,
            metrics=dict(outcome.metrics),
            seconds={**outcome.seconds, "tuner": tuner},
            effective=dict(outcome.effective),
            counters=dict(outcome.counters),
            block=block,
            seed=self.study.seed + block,
            started_at=ended - sum(outcome.seconds.values()),
            ended_at=ended,
            provenance={"autotune": __version__, "host": host_digest(), "pid": os.getpid()},
            counted=outcome.counted,
        )


def _needs_default(trials: Sequence[Trial], default: Config) -> None:
    """Raise TuneError when the default was measured and failed: nothing could be compared with it."""
    failed = next((t for t in trials if t.config_key == default.key and t.status != Status.OK), None)
    if failed is not None:
        raise TuneError(
            f"the default configuration failed ({failed.status}): {failed.reason}\n"
            "Nothing can be compared with it. Try another --model or --workload, or a plan with [knobs].", 3
        )  # fmt: skip


def round_name(contenders: Sequence[Config]) -> str:
    """Names one confirmation by who takes part, so that a resumed one goes on and a changed one starts afresh."""
    text = "\n".join(sorted(config.key for config in contenders))
    return "r1:" + hashlib.sha256(text.encode()).hexdigest()[:12]


def decide_rows(rows: Sequence[Trial], default: Config, name: str, objective: Objective) -> Result:
    """The decision of round ``name`` from stored rows alone."""
    used = tuple(t for t in rows if t.provenance.get("round") == name and t.status == Status.OK)
    blocks: dict[str, dict[int, float]] = {}
    configs: dict[str, Mapping[str, Any]] = {}
    for trial in used:
        value = objective.raw(trial.metrics)
        if value is not None:
            blocks.setdefault(trial.config_key, {})[trial.block] = value
            configs[trial.config_key] = trial.config
    winner = stats.decide(blocks, default.key, objective.higher)
    if winner is None:
        raise TuneError("the confirming runs of the default or of every finalist failed; `autotune query` shows why", 3)
    return Result(winner, Config(configs[winner.config_key]), default, name, used)


def decided(trials: Sequence[Trial], scenario: Scenario) -> Iterator[Result]:
    """The decisions of all rounds among confirming trials that have the two paired blocks an interval needs."""
    objective = Objective(str(scenario.objective["metric"]))
    counted = [trial for trial in trials if trial.counted]
    for name in dict.fromkeys(trial.provenance.get("round") for trial in counted):
        round_ = [trial for trial in counted if trial.provenance.get("round") == name]
        default = next((t for t in round_ if t.config_key == t.provenance.get("default")), None)
        if default is None or not isinstance(name, str):
            continue
        try:
            result = decide_rows(round_, Config(default.config), name, objective)
        except TuneError:
            continue
        if result.winner.ratio.n > 1:
            yield result


def _samples(trial_id: str, outcome: Outcome) -> list[Sample]:
    return [
        Sample(
            trial_id=trial_id,
            index=index,
            facts={"conversation": t.conversation, "turn": t.turn},
            sent=t.sent,
            token_times=t.token_times,
            prompt_tokens=t.prompt_tokens,
            output_tokens=t.output_tokens,
            error=t.error,
        )
        for index, t in enumerate(outcome.timelines)
    ]
