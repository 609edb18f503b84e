"""Which server a plan means: its runtime from the plan's command, and its space as far as that build offers it."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path

from autotune.plan import Plan
from autotune.runtimes.base import Runtime
from autotune.runtimes.server import llamacpp
from autotune.runtimes.server.runtime import Engine, Limits, ServerRuntime
from autotune.runtimes.server.sglang import Sglang
from autotune.runtimes.server.vllm import VLLM
from search_spaces import Space, SpaceError, load


def server(plan: Plan, folder: Path, longest: int) -> ServerRuntime:
    """The plan's engine on ``folder``; ``longest`` tokens is the longest sequence that it must take."""
    given = shlex.split(plan.engine_command)
    if plan.engine == "llamacpp":
        if importlib.util.find_spec("gguf") is None:
            raise SpaceError("engine llamacpp needs the packages of `pip install 'autotune[llamacpp]'`")
        prefix = given or list(llamacpp.usual_command())
        engine: Engine = llamacpp.LlamaCpp(prefix, folder, longest)
    else:
        prefix = given or [plan.engine]
        engine = (Sglang if plan.engine == "sglang" else VLLM)(prefix, folder, longest)
    return ServerRuntime(engine, prefix, Limits(launch=plan.launch_seconds), plan.port)


def space(runtime: Runtime, engine: str) -> Space:
    """The engine's whole space, less what the build behind ``runtime`` has not. Raises SpaceError."""
    if not isinstance(runtime, ServerRuntime):
        return load(engine)
    platform = str(runtime.capabilities()["platform"])
    if platform != "cpu":
        raise SpaceError(
            f"{engine} {runtime.version()[engine]} is a build for GPUs, and a search of those has not been tried yet; "
            f"`autotune space --engine {engine} --hardware 4xA100-80GB` shows its space"
        )
    return runtime.engine.offered(load(engine, platform))
