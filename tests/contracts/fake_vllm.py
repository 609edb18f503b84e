"""A small HTTP server that speaks vLLM's command line, routes, log lines and metrics, and fails on demand. Its speed is
made of sleeps: it tests what drives a server, never how fast one is.

``FAKE_FAULTS``: a JSON list of {"do": KIND, "when": {flag: value}, …}; see `FAULTS`. ``FAKE_LEDGER``: a folder in which
every process that holds device memory has a file with its bytes, named after its process id.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import signal
import sys
import time
import zlib
from pathlib import Path
from typing import Any

VOCABULARY = 128
HELD = 1 << 30
FLAGS = {
    "dtype": "{auto,bfloat16,float16,float32}", "kv-cache-dtype": "{auto,bfloat16,fp8_e4m3}",
    "block-size": "BLOCK_SIZE", "max-num-seqs": "MAX_NUM_SEQS", "max-num-batched-tokens": "TOKENS",
    "kv-cache-memory-bytes": "BYTES", "max-model-len": "LENGTH", "max-logprobs": "COUNT", "host": "HOST",
    "port": "PORT", "served-model-name": "NAME [NAME ...]",
}  # fmt: skip
SWITCHES = ("enable-prefix-caching", "enforce-eager", "enable-chunked-prefill")
FAULTS = (
    "say",  # print ``text`` and go on
    "exit",  # print ``text`` and end with ``code`` before serving; with ``times`` only that often
    "slow",  # serve after ``seconds``
    "deaf",  # ignore SIGTERM
    "fork",  # leave a process in a session of its own that ignores SIGTERM and holds memory
    "leak",  # memory stays in use for ``seconds`` after the end
    "die",  # print ``text`` and end with ``code`` at request ``at``
    "core",  # from request ``at`` on the engine behind the server is dead: 500, /health 503
    "hang",  # no answer from request ``at`` on
    "lie",  # report ``value`` for ``knob``
    "http500", "empty", "miscount", "cut",  # that happens to a ``share`` of requests
    "late",  # ``seconds`` before a ``share`` of requests' first token
    "decay",  # each request takes ``share`` longer than the one before
    "garbage",  # log-probabilities of another model
)  # fmt: skip


class State:
    """What the server was started with, and what it has done."""

    def __init__(self, words: list[str]) -> None:
        self.flags: dict[str, Any] = {"dtype": "bfloat16", "max-num-seqs": "128", "block-size": "128",
                                      "kv-cache-dtype": "auto", "max-num-batched-tokens": "2048",
                                      "enable-prefix-caching": True, "enforce-eager": False,
                                      "enable-chunked-prefill": True}  # fmt: skip
        rest = list(words)
        self.model = rest.pop(0)
        while rest:
            flag = rest.pop(0).removeprefix("--")
            if flag.removeprefix("no-") in SWITCHES:
                self.flags[flag.removeprefix("no-")] = not flag.startswith("no-")
            elif flag in FLAGS:
                self.flags[flag] = rest.pop(0)
            else:
                print(f"usage: vllm serve [model_tag] [options]\nvllm: error: unrecognized arguments: --{flag}")
                sys.exit(2)
        self.faults = {
            f["do"]: f
            for f in json.loads(os.environ.get("FAKE_FAULTS", "[]"))
            if all(str(self.flags.get(k)) == str(v) for k, v in f.get("when", {}).items())
        }
        self.name = self.flags.get("served-model-name", self.model)
        self.requests, self.seen = 0, set[int]()
        self.counts = {"prefix_cache_queries": 0, "prefix_cache_hits": 0, "generation_tokens": 0, "prompt_tokens": 0,
                       "num_preemptions": 0}  # fmt: skip
        self.slots = asyncio.Semaphore(int(self.flags["max-num-seqs"]))
        self.draw = random.Random(7)

    def struck(self, kind: str) -> bool:
        return kind in self.faults and self.draw.random() < self.faults[kind].get("share", 1.0)

    def reached(self, kind: str) -> bool:
        return kind in self.faults and self.requests >= self.faults[kind].get("at", 1)

    def told(self, knob: str, value: Any) -> Any:
        lie = self.faults.get("lie", {})
        return lie["value"] if lie.get("knob") == knob else value

    def config(self) -> dict[str, Any]:
        """`/server_info`'s vllm_config."""
        f = self.flags
        held = int(f.get("kv-cache-memory-bytes", 256 << 20))
        return {
            "model_config": {"dtype": "torch." + self.told("dtype", f["dtype"]), "enforce_eager": f["enforce-eager"]},
            "cache_config": {
                "block_size": int(self.told("block_size", f["block-size"])), "num_gpu_blocks": 64,
                "cache_dtype": self.told("kv_cache_dtype", f["kv-cache-dtype"]), "kv_cache_memory_bytes": held,
                "enable_prefix_caching": self.told("prefix_caching", f["enable-prefix-caching"]),
            },
            "scheduler_config": {
                "max_num_seqs": int(self.told("max_num_seqs", f["max-num-seqs"])),
                "max_num_batched_tokens": int(f["max-num-batched-tokens"]),
                "enable_chunked_prefill": f["enable-chunked-prefill"],
            },
        }  # fmt: skip

    async def generate(self, body: dict[str, Any], write: Any) -> None:
        """The events of one streamed completion."""
        prompt, wanted = body["prompt"], body["max_tokens"]
        if self.struck("late"):
            await asyncio.sleep(self.faults["late"]["seconds"])
        async with self.slots:
            await asyncio.sleep(self.prefill(prompt))
            sent, cut = 0, self.struck("cut")
            for index in range(0 if self.struck("empty") else wanted):
                await asyncio.sleep(0.002 * self.slowness())
                if cut and index == wanted // 2:
                    return
                sent += 1
                self.counts["generation_tokens"] += 1
                token = zlib.crc32(repr((prompt, index)).encode()) % VOCABULARY
                last = "length" if sent == wanted else None
                await write({"choices": [{"text": "", "token_ids": [token], "finish_reason": last}]})
        wrong = 1 if self.struck("miscount") else 0
        usage = {"prompt_tokens": len(prompt), "completion_tokens": sent + wrong}
        await write({"choices": [], "usage": usage})

    def slowness(self) -> float:
        eager = 1.3 if self.flags["enforce-eager"] else 1.0
        return eager * (1 + self.faults.get("decay", {}).get("share", 0.0) * self.requests)

    def prefill(self, prompt: list[int]) -> float:
        """Seconds for the blocks of a prompt that no earlier one has left in the cache."""
        size, cached = int(self.flags["block-size"]), 0
        keys = [zlib.crc32(repr(prompt[:end]).encode()) for end in range(size, len(prompt) + 1, size)]
        if self.flags["enable-prefix-caching"]:
            while cached < len(keys) and keys[cached] in self.seen:
                cached += 1
            self.seen |= set(keys)
        self.counts["prompt_tokens"] += len(prompt)
        self.counts["prefix_cache_queries"] += len(prompt)
        self.counts["prefix_cache_hits"] += cached * size
        return 0.0002 * (len(prompt) - cached * size)

    def score(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt, top = body["prompt"], body["prompt_logprobs"]
        top = VOCABULARY if top < 0 else min(top, VOCABULARY)
        rows: list[Any] = [None]
        for index in range(1, len(prompt)):
            draw = random.Random(repr((prompt[:index], "garbage" in self.faults)))
            logits = [draw.gauss(0, 1) for _ in range(VOCABULARY)]
            norm = math.log(sum(math.exp(x) for x in logits))
            best = sorted(range(VOCABULARY), key=lambda t: -logits[t])[:top]
            named = [*best, prompt[index] % VOCABULARY]
            rows.append({str(t): {"logprob": logits[t] - norm} for t in named})
        return {"choices": [{"text": "", "prompt_logprobs": rows}]}


def stat(pid: int) -> str:
    """The kernel's line on a process; that of a zombie for one that is gone."""
    try:
        return Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return " Z "


def ledger(pid: int | str, amount: int) -> None:
    folder = os.environ.get("FAKE_LEDGER")
    if folder:
        Path(folder, str(pid)).write_text(str(amount))


def held(folder: Path) -> int:
    """Bytes that living processes hold, and what was leaked until its time is over."""
    total = 0
    for entry in folder.iterdir():
        if entry.name.startswith("leak-"):
            total += HELD if time.time() < float(entry.read_text()) else 0
        elif " Z " not in stat(int(entry.name)):
            total += int(entry.read_text())
    return total


def orphan() -> None:
    """A worker that leaves the tree: a grandchild in a session of its own whose parent is gone."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ledger(os.getpid(), HELD)
    while True:
        time.sleep(60)


def prepare(state: State) -> None:
    """The faults of a start, in the order in which a real one would meet them."""
    print("INFO 12-01 12:00:00 [core.py:1] Initializing a V1 LLM engine (fake)", flush=True)
    faults = state.faults
    ledger(os.getpid(), HELD)
    if "leak" in faults:
        ledger(f"leak-{os.getpid()}", 0)
        Path(os.environ["FAKE_LEDGER"], f"leak-{os.getpid()}").write_text(str(time.time() + faults["leak"]["seconds"]))
    if "say" in faults:
        print(faults["say"]["text"], flush=True)
    if "deaf" in faults:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "fork" in faults:
        orphan()
    if "exit" in faults and often_enough(faults["exit"]):
        print(faults["exit"].get("text", ""), flush=True)
        os._exit(faults["exit"].get("code", 1))
    time.sleep(faults.get("slow", {}).get("seconds", 0))
    print("INFO 12-01 12:00:01 [kv.py:1] CPU KV cache size: 8,192 tokens, Maximum concurrency: 8.00x", flush=True)


def often_enough(fault: dict[str, Any]) -> bool:
    """Whether a fault with ``times`` strikes this time; launches are counted beside the ledger."""
    counter = Path(os.environ.get("FAKE_LEDGER", "") + ".starts")
    done = int(counter.read_text()) if counter.exists() else 0
    counter.write_text(str(done + 1))
    return done < fault.get("times", math.inf)


async def answer(state: State, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request; the connection ends with it."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((int(x.split(":")[1]) for x in head.split("\r\n") if x.lower().startswith("content-length")), 0)
        body = json.loads(await reader.readexactly(length) or b"{}")
        await route(state, head.split(" ")[1].split("?")[0], body, writer)
        await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


def send(writer: asyncio.StreamWriter, status: int, body: str, kind: str = "application/json") -> None:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body.encode())}\r\n"
    writer.write(f"{head}Connection: close\r\n\r\n{body}".encode())


async def route(state: State, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    if path == "/health":
        send(writer, 503 if state.reached("core") else 200, "")
    elif path == "/v1/models":
        send(writer, 200, json.dumps({"data": [{"id": state.name}]}))
    elif path == "/server_info" and "no_info" not in state.faults:
        send(writer, 200, json.dumps({"vllm_config": state.config(), "vllm_env": {}}))
    elif path == "/metrics":
        labels = f'{{engine="0",model_name="{state.name}"}}'
        send(
            writer, 200, "".join(f"vllm:{k}_total{labels} {float(v)}\n" for k, v in state.counts.items()), "text/plain"
        )
    elif path == "/reset_prefix_cache":
        state.seen.clear()
        send(writer, 200, "")
    elif path != "/v1/completions":
        send(writer, 404, '{"error": {"message": "not found"}}')
    elif "prompt_logprobs" in body:
        send(writer, 200, json.dumps(state.score(body)))
    else:
        await complete(state, body, writer)


async def complete(state: State, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    state.requests += 1
    if state.reached("die"):
        print(state.faults["die"].get("text", ""), flush=True)
        os._exit(state.faults["die"].get("code", 1))
    if state.reached("hang"):
        await asyncio.sleep(3600)
    if state.struck("http500") or state.reached("core"):
        send(writer, 500, '{"error": {"message": "EngineCore encountered an issue"}}')
        return
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")

    async def write(event: dict[str, Any]) -> None:
        writer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await writer.drain()

    await state.generate(body, write)
    writer.write(b"data: [DONE]\n\n")


async def serve(state: State) -> None:
    port = int(state.flags.get("port", 8000))
    try:
        server = await asyncio.start_server(lambda r, w: answer(state, r, w), "127.0.0.1", port)
    except OSError as error:
        print(f"OSError: [Errno {error.errno}] error while attempting to bind on address: address already in use")
        sys.exit(1)
    print("INFO:     Application startup complete.", flush=True)
    async with server:
        await server.serve_forever()


def main(words: list[str]) -> None:
    if words == ["--version"]:
        print("0.99.0+cpu")
    elif words == ["serve", "--help=all"]:
        print("usage: vllm serve [model_tag] [options]\n\noptions:")
        for name, takes in FLAGS.items():
            print(f"  --{name} {takes}\n                        What it does. See --other.")
        for name in SWITCHES:
            print(f"  --{name}, --no-{name}")
    else:
        state = State(words[1:])
        prepare(state)
        asyncio.run(serve(state))


if __name__ == "__main__":
    main(sys.argv[1:])
