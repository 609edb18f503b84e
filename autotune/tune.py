"""The study: search, then confirm. Writes each trial as it ends and resumes from rows alone; prints nothing."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune import endings, guards, race, stats
from autotune.bench import Measuring
from autotune.decision import Result, TuneError, decide_rows, needs_default, round_name
from autotune.hints import Candidate, by_load
from autotune.infeasible import beside, learned
from autotune.judge import Judge, samples
from autotune.metrics import Timeline
from autotune.objective import Objective
from autotune.outcome import EngineError, Outcome, Status
from autotune.pruning import MARGIN, Hopeless
from autotune.record import described
from autotune.sampler import Sampler
from autotune.sharing import Shared, stand_in
from autotune.slo import Slo
from search_spaces import Config
from tuning_db import Store, Trial
from tuning_db.claims import Claim

FREE_LIMIT = 20
"""Endings in a row that say nothing about a configuration (port taken, device busy) before the study gives up."""
TRIES = 3
"""Runs of one block when the machine disturbed it; the last counts, with a note."""
SEARCH_SHARE = 0.7
"""Share of a time limit that the search may take; the rest is for confirming."""


@dataclass(frozen=True, slots=True)
class Study:
    """What a study wants: ``budget`` counted search trials, then at most ``blocks`` interleaved blocks of at most
    ``finalists``.

    ``slos`` are constraints; ``seconds`` above 0 limits one run of the command; ``candidates`` are tried right after
    the default; every ``drift_every`` trials the default is measured again.
    """

    scenario_key: str
    objective: Objective
    budget: int
    seed: int = 0
    finalists: int = 8
    blocks: int = 15
    slos: tuple[Slo, ...] = ()
    seconds: float = 0.0
    candidates: tuple[Candidate, ...] = ()
    drift_every: int = 25
    sampler: str = "gp"


class Tuner:
    """Runs one study on one bench against one store. ``ending`` says why the search ended, once it has.

    Several may run the same study at once: each claims a configuration, or a block of the confirmation, before it
    measures it, learns what the others measured, and waits with ``pause`` only for what it cannot do without.
    """

    def __init__(
        self, study: Study, bench: Measuring, store: Store, clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self.study, self.bench, self.store = study, bench, store
        self.space = bench.space
        self.judge = Judge(study.objective, study.slos, store)
        self.ending: endings.Ending | None = None
        self._clock, self._start, self._free = clock, clock(), 0
        self.shared = Shared(store, study.scenario_key, pause)
        self._confirmed: list[Config] | None = None
        self._leader: Trial | None = None
        self._requests: tuple[Timeline, ...] = ()
        self._margin = MARGIN

    def screen(self) -> Iterator[Trial]:
        """Measure the default twice (A/A, see `self_check`), then the study's candidates, within the budget.

        Raises TuneError as `search` does.
        """
        self._has_choice()
        default = self.space.default()
        if not self._default_row("search"):
            self._reference()
        while not self._default_row("search") and not self._over(SEARCH_SHARE):
            if not (yield from self._counted(default)):
                self.shared.pause()
        for trial in (done := self.stored("search")):
            self._follow(trial)
        needs_default(done, default)
        if not self._default_row("screen") and not self._over(SEARCH_SHARE):
            yield from self._once("screen", default, {"candidate": "A/A check of the default"})
        for candidate in by_load(self.space, self.study.candidates):
            done = self.stored("search")
            known = candidate.config.key in {trial.config_key for trial in done}
            if len(done) < self.study.budget and not known and not self._over(SEARCH_SHARE):
                yield from self._counted(candidate.config, about={"candidate": candidate.why})

    def search(self) -> Iterator[Trial]:
        """Measure until ``budget`` counted trials exist, or an earlier `endings` rule; yields each once it is stored.

        Raises TuneError when the default fails, when there is nothing to choose, or when the machine keeps failing.
        """
        self._has_choice()
        sampler = Sampler(self.space, self.study.budget, self.study.seed, self.study.sampler)
        done = self.stored("search")
        for known in done:
            self._learn(sampler, known)
            self._follow(known)
        sampler.narrow(learned(self.space, done))
        self._margin = MARGIN * (1 + self.band())
        if len(done) < self.study.budget:
            self._reference()
        while not self._ended(done):
            needs_default(done, self.space.default())
            asked = time.monotonic()
            trial: Trial | None = None
            config = sampler.ask(near=Config(done[-1].config) if done else None)
            if config is not None:
                trial = yield from self._counted(config, time.monotonic() - asked)
                if trial is not None and trial.counted:
                    self._take_in(sampler, done, trial)
                    yield from self._watch_drift(len(done))
            others = self.shared.others("search")
            if config is None and not others:
                self.ending = endings.exhausted(len(done))
                return
            if trial is None:
                self._give_way(sampler, done, config if config is not None and config.key in others else None)
            if others or trial is None:
                self._catch_up(sampler, done)

    def _give_way(self, sampler: Sampler, done: Sequence[Trial], taken: Config | None) -> None:
        """Turn to something else than ``taken``, which another search measures; without it wait for the others."""
        value = stand_in([self.judge.feasible(trial) for trial in done]) if taken is not None else None
        if taken is None or value is None:
            self.shared.pause()
        else:
            sampler.tell(taken, value)

    def _catch_up(self, sampler: Sampler, done: list[Trial]) -> None:
        """Learn what other searches stored meanwhile."""
        known = {trial.id for trial in done}
        for trial in self.stored("search"):
            if trial.id not in known:
                self._take_in(sampler, done, trial)
                self._follow(trial)

    def _take_in(self, sampler: Sampler, done: list[Trial], trial: Trial) -> None:
        self._learn(sampler, trial)
        done.append(trial)
        if trial.status not in (Status.OK, Status.QUALITY, Status.PRUNED):
            sampler.narrow(learned(self.space, done))

    def _has_choice(self) -> None:
        if not self.space.free():
            raise TuneError("there is nothing to choose: the space has one configuration; loosen the plan's [knobs]", 3)

    def _ended(self, done: Sequence[Trial]) -> bool:
        if len(done) >= self.study.budget:
            self.ending = endings.budget(len(done))
        elif self._over(SEARCH_SHARE):
            self.ending = endings.time_spent(SEARCH_SHARE * self.study.seconds, len(done))
        else:
            self.ending = endings.idle(done, self.judge, self.space)
        return self.ending is not None

    def _over(self, share: float = 1.0) -> bool:
        return self.study.seconds > 0 and self._clock() - self._start >= share * self.study.seconds

    def _counted(
        self, config: Config, tuner_seconds: float = 0.0, about: Mapping[str, str] | None = None
    ) -> Generator[Trial, None, Trial | None]:
        """One search trial, stored; None where another search has it, or the rest of the budget.

        Gives up after FREE_LIMIT endings in a row that were the machine's.
        """
        with self.shared.hold(f"search/{config.key}", self.study.budget) as claim:
            if claim is None or any(t.config_key == config.key for t in self.stored("search", config.key)):
                return None
            name, watch = config.key[3:11], self._hopeless(config)
            outcome = self.bench.measure(config, self.study.seed, name, watch, fresh=False)
            trial = self._trial("search", config, outcome, 0, tuner_seconds)
            trial = replace(trial, provenance={**trial.provenance, **(about or {})})
            trial = self.store.add(trial, samples(trial.id, outcome.timelines), claim)
        self._follow(trial)
        yield trial
        self._free = 0 if outcome.counted else self._free + 1
        if self._free >= FREE_LIMIT:
            raise TuneError(f"{self._free} launches in a row failed for outside reasons, the last: {outcome.reason}", 1)
        return trial

    def _hopeless(self, config: Config) -> Hopeless | None:
        """What gives a run up part-way; None for the default, or where nothing feasible can be compared with."""
        metric = self.study.objective.metric
        if config == self.space.default() or self._leader is None or not Hopeless.judges(metric):
            return None
        self._requests = self._requests or self.judge.timelines(self._leader)
        return Hopeless(metric, self._leader.metrics[metric], self._requests, self._margin)

    def _follow(self, trial: Trial) -> None:
        """Keep the best feasible trial of the search, and its requests, to compare runs under way with."""
        value = self.judge.feasible(trial) if trial.counted else None
        if value is not None and (self._leader is None or value > (self.judge.feasible(self._leader) or -math.inf)):
            self._leader, self._requests = trial, ()

    def _watch_drift(self, count: int) -> Iterator[Trial]:
        """Measure the default again where its turn has come."""
        every = self.study.drift_every
        number = count // every if every > 0 else 0
        if number and count % every == 0:
            yield from self._once("drift", self.space.default(), {}, number)

    def _once(self, stage: str, config: Config, about: Mapping[str, Any], number: int = 0) -> Iterator[Trial]:
        """One run outside the budget, unless it is stored already or another search is at it."""
        with self.shared.hold(f"{stage}/{number}") as claim:
            stored = any(t.block == number for t in self.stored(stage, config.key))
            trial = self._repeat(stage, config, 0, about, number, claim) if claim and not stored else None
        if trial is not None:
            yield trial

    def drift(self) -> guards.Drift | None:
        """How the default's own value moved through the study; None below two readings."""
        default = self.space.default().key
        rows = [t for stage in ("search", "screen", "drift") for t in self.stored(stage) if t.config_key == default]
        values = [(t.ended_at, self.study.objective.goodness(t.metrics)) for t in rows]
        return guards.drift([(at, value) for at, value in values if value is not None])

    def self_check(self) -> guards.SelfCheck | None:
        """The default against itself on the same prompts; None before both runs, or without requests."""
        first, second = self._default_row("search"), self._default_row("screen")
        if first is None or second is None:
            return None
        return guards.self_check(self.judge.timelines(first), self.judge.timelines(second))

    def band(self) -> float:
        """The tie band: 2 %, or as wide as the A/A check asks for."""
        check = self.self_check()
        return check.band if check is not None else stats.BAND

    def _default_row(self, stage: str) -> Trial | None:
        key = self.space.default().key
        return next((trial for trial in self.stored(stage) if trial.config_key == key), None)

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
        """The best feasible configurations of the search, best first, without the default; see `race.enter`.

        Where every other was given up part-way, the best of those, so that the default is confirmed against one.
        """
        rows = [trial for trial in self.stored("search") if trial.config_key != self.space.default().key]
        return race.finalists(rows, self.judge, self.study.finalists)

    def confirm(self) -> Iterator[Trial]:
        """Re-measure the finalists interleaved with the default in random order, a fresh launch each time.

        From the sixth block on finalists are dropped and the race may end early; see `race.alive`, `race.settled`.
        """
        finalists = self._confirmed = self.finalists()
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
        about: dict[str, Any] = {"round": name, "default": contenders[0].key, "band": self.band()}
        about["slos"] = [slo.text for slo in self.study.slos]
        left = list(range(1, blocks + 1))
        while left:
            taken = []
            for block in left:
                # A block is one search's: runs are paired within it, so they belong on one machine.
                with self.shared.hold(f"{stage}/{name}/{block}") as claim:
                    if claim is None:
                        taken.append(block)
                        continue
                    rows = self.stored(stage)
                    have = {t.config_key for t in rows if t.provenance.get("round") == name and t.block == block}
                    order = list(alive(name, contenders, block))
                    random.Random(f"{self.study.seed}/{block}").shuffle(order)
                    for config in order:
                        if self._over():
                            return
                        if config.key not in have:
                            yield self._repeat(stage, config, block, about, None, claim)
            if taken == left and self._over():
                return
            if taken:
                self.shared.pause()
            left = taken

    def _repeat(
        self, stage: str, config: Config, seed: int, about: Mapping[str, Any], number: int | None, claim: Claim
    ) -> Trial:
        """One run outside the budget, on the prompts of ``seed``, again while the machine disturbs it."""
        block = seed if number is None else number
        for attempt in range(1, TRIES + 1):
            outcome = self.bench.measure(config, self.study.seed + seed, name=f"{config.key[3:11]}-{block}")
            final = attempt == TRIES or (outcome.counted and not outcome.disturbed)
            trial = self._trial(stage, config, outcome, block, 0.0)
            trial = replace(
                trial, provenance={**trial.provenance, **about}, counted=outcome.counted and final,
                seed=self.study.seed + seed,
            )  # fmt: skip
            if final or outcome.counted:
                trial = self.store.add(trial, samples(trial.id, outcome.timelines), claim)
            if final:
                break
        return trial

    def _alive(self, name: str, contenders: Sequence[Config], block: int) -> Sequence[Config]:
        values = race.values(self.stored("confirm"), name, block, self.study.objective)
        named = {config.key: config for config in contenders}
        default, *finalists = named
        kept = race.alive(values, finalists, block)
        if block > race.LEAST and race.settled(values, default, kept, len(finalists), self.band()):
            return []
        return [named[key] for key in (default, *kept)]

    def result(self) -> Result:
        """Decide from the confirming rows. Raises TuneError: code 3 when nothing feasible was found, 124 when the
        time was spent before two paired blocks."""
        # Others may have searched on since the confirmation began; it is judged by those who took part.
        finalists = self.finalists() if self._confirmed is None else self._confirmed
        default = self.space.default()
        if not finalists:
            if self._over(SEARCH_SHARE):
                raise self._late()
            raise TuneError(endings.nothing_feasible(self.stored("search"), self.judge, self.space), 3)
        name = round_name([default, *finalists])
        try:
            found = decide_rows(self.stored("confirm"), default, name, self.study.objective, self.judge)
        except TuneError as error:
            raise (self._late() if self._over() else error) from None
        if found.winner.ratio.n < 2 <= self.study.blocks and self._over():
            raise self._late()
        return found

    def _late(self) -> TuneError:
        return TuneError(
            f"the time limit of {self.study.seconds:g} s was spent before a first result; every trial is kept, "
            "and the same command goes on from here", 124
        )  # fmt: skip

    def _learn(self, sampler: Sampler, trial: Trial) -> None:
        """A failure is told as one, an unmet SLO or gate as a violated constraint, a pruned trial as its bound."""
        violation = 0.0
        if trial.status == Status.QUALITY:
            violation = max(self.bench.gate.violation(trial.metrics), 1e-6)
        elif trial.status == Status.OK:
            violation = self.judge.violation(trial)
        elif trial.status != Status.PRUNED:
            violation = 1.0
        sampler.tell(Config(trial.config), self.judge.goodness(trial), violation)

    def stored(self, stage: str, config_key: str | None = None) -> list[Trial]:
        """The counted trials of one stage, or of one configuration in it, oldest first."""
        rows = self.store.trials(scenario_key=self.study.scenario_key, stage=stage, config_key=config_key)
        return [row for row in rows if row.counted]

    def _trial(self, stage: str, config: Config, outcome: Outcome, block: int, tuner: float) -> Trial:
        trial = described(outcome, config, self.study.objective)
        return replace(
            trial, scenario_key=self.study.scenario_key, stage=stage, block=block, seed=self.study.seed + block,
            seconds={**trial.seconds, "tuner": tuner},
            provenance={**trial.provenance, **beside(self.space, config, outcome.counters)},
        )  # fmt: skip
