"""Configurations far apart in the whole space are launched, streamed from, scored and closed; nothing is left over."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import tempfile
import threading
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune import model
from autotune.runtimes.base import Endpoint, Generation
from autotune.runtimes.native import NativeRuntime
from autotune.runtimes.native import zygote as zygotes
from search_spaces import Config, Space, load

COUNT, PAGE = 24, os.sysconf("SC_PAGE_SIZE")
PROMPTS = tuple(tuple(range(4 + start, 4 + start + length)) for start, length in ((0, 1), (2, 33), (5, 80)))


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of our own for temporary files, and a zygote of our own that uses it."""
    folder = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)
        zygotes._shared.cache_clear()
        yield folder
        zygotes._shared.cache_clear()


@pytest.fixture(scope="module")
def runtime(tiny: Path, temporary: Path) -> NativeRuntime:
    return NativeRuntime(tiny)


@pytest.fixture(scope="module")
def space(runtime: NativeRuntime) -> Space:
    facts = model.facts(runtime.folder)
    return load("native").narrow(
        {
            **runtime.capabilities(),
            "layers": facts.layers,
            "state_bytes": facts.state_bytes,
            "mlps": facts.mlp_kinds,
            "experts": facts.experts,
            "sizes": facts.sizes,
            "inputs": facts.inputs,
            "longest": 100,
        }
    )


def far_apart(space: Space, count: int) -> list[Config]:
    """Valid configurations, each the one of many random ones that differs most from all before it (maximin)."""
    source, pool = random.Random(0), dict[str, Config]()
    while len(pool) < 400:
        config = space.complete({knob.name: source.choice(knob.domain.values) for knob in space.free()})
        if not space.broken(config):
            pool[config.key] = config
    chosen = [space.default()]
    while len(chosen) < count:
        nearest = {c: min(sum(c.get(n) != d.get(n) for n in {*c, *d}) for d in chosen) for c in pool.values()}
        chosen.append(max(nearest, key=nearest.__getitem__))
    return chosen


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def children(pid: int) -> set[int]:
    return {
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    }


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def use(endpoint: Endpoint, config: Config) -> None:
    """Everything that a study does with an engine: streams side by side, one broken off, then scores."""

    async def one(prompt: tuple[int, ...], stop: int = 1000) -> list[int]:
        found: list[int] = []
        async with aclosing(endpoint.stream(Generation(prompt, 6))) as chunks:
            async for chunk in chunks:
                found.extend(chunk.tokens)
                if len(found) >= stop:
                    break
        return found

    async def together() -> list[list[int]]:
        return await asyncio.gather(one(PROMPTS[1], 2), *map(one, PROMPTS))

    broken, *answers = asyncio.run(together())
    assert len(broken) == 2 and [len(answer) for answer in answers] == [6] * len(PROMPTS)
    score = endpoint.score([PROMPTS[-1]], 20)[0]
    assert score.ids.shape == (79, 20) and np.isfinite(score.logprobs).all() and np.isfinite(score.top).all()
    effective, counters = endpoint.effective(), endpoint.counters()
    assert {name: effective[name] for name in config} == dict(config)
    assert all(np.isfinite(value) and value >= 0 for value in counters.values()), counters
    assert counters["kv_used_tokens"] == 0
    endpoint.reset()


def test_any_configuration_runs_and_leaves_nothing(
    runtime: NativeRuntime, space: Space, temporary: Path, tmp_path: Path
) -> None:
    here, zygote = os.getpid(), zygotes.zygote()._process.pid
    before: dict[str, Any] = {}
    others = children(here) - {zygote}  # of earlier tests, such as a resource tracker
    for number, config in enumerate(far_apart(space, COUNT)):
        with runtime.launch(config, tmp_path / "log") as endpoint:
            use(endpoint, config)
        del endpoint
        gc.collect()
        found = {
            "children": (children(here) - others, children(zygote)),
            "descriptors": (descriptors(here), descriptors(zygote)),
            "threads": threading.active_count(),
            "temporary": sorted(path.name for path in temporary.rglob("*")),
        }
        sizes = (resident(here), resident(zygote))
        if number == 1:  # by now everything that is loaded once is
            before, first = found, sizes
        elif number > 1:
            assert found == before, config
            assert all(now - then < 8 << 20 for now, then in zip(sizes, first, strict=True)), (sizes, first)
    assert before["children"] == ({zygote}, set())
    assert len(before["temporary"]) == 1  # the zygote's own, empty folder
    zygotes.zygote().close()
    assert list(temporary.iterdir()) == []
