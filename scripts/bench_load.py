"""Our load generator against `vllm bench serve`: the same vLLM server, the same kind of requests, runs interleaved.

`python scripts/bench_load.py --engine-command VLLM --model FOLDER`: the very same prompts of one length, a fixed
number under way. Ratios ours / theirs with 95 % intervals over rounds; `--quick` runs 3 rounds, under a minute once
the server is up. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from autotune import engines, loadgen, stats
from autotune.metrics import derive
from autotune.plan import Plan
from autotune.runtimes.server.http import HttpEndpoint
from autotune.workload import Conversation, Workload, build

PROMPT, OUTPUT, TOGETHER = 128, 32, 8
THEIRS = {"output_tok_s": "output_throughput", "ttft_p50": "median_ttft_ms", "tpot_p50": "median_tpot_ms",
          "e2e_p50": "median_e2el_ms"}  # fmt: skip
TITLES = {"output_tok_s": "output tokens a second", "ttft_p50": "median time to first token",
          "tpot_p50": "median time per output token", "e2e_p50": "median time of a request"}  # fmt: skip


def conversations(requests: int, seed: int) -> tuple[Workload, list[Conversation]]:
    """The requests of one round: printable ASCII, a token a byte, so that both clients can send the very same."""
    workload = Workload("bench", "", "synthetic", requests, (PROMPT, PROMPT), (OUTPUT, OUTPUT), concurrency=TOGETHER)
    dice = random.Random(seed)
    return workload, list(build(workload, [dice.randrange(33, 127) for _ in range(1 << 16)], seed))


def ours(endpoint: HttpEndpoint, requests: int, seed: int) -> dict[str, float]:
    """One run of our client."""
    run = loadgen.drive(endpoint, *conversations(requests, seed), 300.0)
    found = derive(run.timelines, run.wall_seconds, run.cpu_seconds, {}, {})
    return {name: found[name] for name in THEIRS}


def theirs(command: list[str], endpoint: HttpEndpoint, folder: Path, requests: int, seed: int) -> dict[str, float]:
    """One run of vLLM's client, in SI units."""
    with tempfile.TemporaryDirectory() as place:
        prompts = Path(place) / "prompts.jsonl"
        rows = [{"prompt": bytes(c.turns[0].tokens).decode("ascii")} for c in conversations(requests, seed)[1]]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="ascii")
        words = [
            *command, "bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions", "--base-url",
            endpoint.base, "--model", endpoint.model, "--tokenizer", str(folder), "--dataset-name", "custom",
            "--dataset-path", str(prompts), "--custom-output-len", str(OUTPUT), "--skip-chat-template",
            "--disable-shuffle", "--num-prompts", str(requests), "--max-concurrency", str(TOGETHER), "--ignore-eos",
            "--disable-tqdm", "--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result", "--result-dir", place,
            "--result-filename", "result.json",
        ]  # fmt: skip
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"`vllm bench serve` ended with code {done.returncode}: {done.stderr[-500:]}")
        table = json.loads((Path(place) / "result.json").read_text(encoding="utf-8"))
    counts = (table["completed"], table["total_input_tokens"], table["total_output_tokens"])
    if counts != (requests, requests * PROMPT, requests * OUTPUT):
        raise SystemExit(f"`vllm bench serve` counted {counts} requests, prompt and output tokens: not what we sent")
    return {name: table[key] / (1000 if key.endswith("_ms") else 1) for name, key in THEIRS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine-command", default="vllm")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.requests = 3, 32
    plan = Plan(engine="vllm", engine_command=options.engine_command, model=str(options.model))
    runtime = engines.server(plan, options.model, 2 * (PROMPT + OUTPUT))
    wanted = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 16, "prefix_caching": False, "block_size": 64}
    config = engines.space(runtime, "vllm").narrow({"mla": False, **runtime.capabilities()}).complete(wanted)
    sides: dict[str, dict[str, dict[int, float]]] = {"ours": {}, "theirs": {}}
    with tempfile.TemporaryDirectory() as logs, runtime.launch(config, Path(logs) / "server.log") as endpoint:
        command = shlex.split(options.engine_command)
        for number in range(options.rounds + 1):
            for side in sorted(sides, reverse=number % 2 == 0):
                arguments = (options.requests, number)
                run = (
                    ours(endpoint, *arguments)
                    if side == "ours"
                    else theirs(command, endpoint, options.model, *arguments)
                )
                for name, value in run.items() if number else ():  # the first round warms up
                    sides[side].setdefault(name, {})[number] = value
    result: dict[str, Any] = {}
    print(f"{options.rounds} rounds of {options.requests} requests of {PROMPT} + {OUTPUT} tokens, {TOGETHER} at once")
    for name, title in TITLES.items():
        ratio = stats.ratio(sides["ours"][name], sides["theirs"][name], higher=True)
        assert ratio is not None
        medians = [statistics.median(sides[side][name].values()) for side in ("ours", "theirs")]
        shown = f"×{ratio.mean:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
        print(f"{title:<30} ours {medians[0]:>8.4g}   vllm bench serve {medians[1]:>8.4g}   {shown}")
        result[name] = {"ratio": round(ratio.mean, 4), "low": round(ratio.low, 4), "high": round(ratio.high, 4)}
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
