"""The step loop: requests in, tokens out, over a decoder, a cache and a scheduler. Knows no process and no text."""

from __future__ import annotations

import resource
import time
from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Ids
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from autotune.runtimes.base import Score
from autotune.runtimes.native import graphs, host
from autotune.runtimes.native.blocks import Blocks
from autotune.runtimes.native.build import Reader, build_decoder, build_head, build_layer
from autotune.runtimes.native.cache import state_bytes
from autotune.runtimes.native.capture import Frame
from autotune.runtimes.native.config import ModelConfig, read_config
from autotune.runtimes.native.kernels import select
from autotune.runtimes.native.model import Recipe, Segment, Widths
from autotune.runtimes.native.quant.calibrate import input_means
from autotune.runtimes.native.quant.policy import Makers, by_length
from autotune.runtimes.native.requests import check_request
from autotune.runtimes.native.scheduler import Scheduler, Sequence, places, step_rows
from autotune.runtimes.native.transfers import TRANSFERS
from autotune.runtimes.native.weights import Checkpoint
from search_spaces import Value, bits

if TYPE_CHECKING:
    from autotune.runtimes.native.collectives import Mesh

Event = tuple[Hashable, tuple[int, ...], str | None]
SCORE_ROWS = 256
"""Positions whose whole distribution is held at once while scoring."""
STEP_COUNTS = (
    "prefill_tokens", "decode_tokens", "steps", "kv_slot_steps", "kv_empty_slot_steps", "kv_peak_empty_slots",
)  # fmt: skip
"""What is counted a step. A slot step is one token slot of a block that a running sequence holds, during one step."""


class Engine:
    """A checkpoint under one complete configuration (see `search_spaces.native`), in this process.

    ``capability`` decides which kernels run; by default it is this process's own. With a ``mesh`` it is one rank of
    several: all get the same requests and take the same steps, and each computes its part. Raises CheckpointError for
    a folder that cannot be loaded.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Value],
        capability: select.Capability | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        start = time.monotonic()
        host.apply(str(config.get("allocator", "default")))
        torch.set_grad_enabled(False)
        if torch.cuda.is_available():  # a default device costs microseconds an operation, so none is set on CPU
            torch.set_default_device("cuda")
        torch.set_num_threads(int(config["threads"]))
        self.knobs, self.model = dict(config), read_config(folder)
        checkpoint = Checkpoint(folder)
        at = capability or select.here(self.model, str(config["kv_dtype"]))
        self.products = select.products(at, str(config["compute"]))
        self.widths = Widths(
            bits.vector(config, self.model.mlps),
            int(config.get("bits_group_size", 64)),
            str(config.get("activations", "weight_only")),
            str(config["compute"]),
            input_means(folder, self.model, checkpoint) if config.get("bits_compensation") == "bias" else None,
            triton=not self.products,
            embed_on_host=config.get("embed_on") == "cpu",
        )
        local = self.model if mesh is None else mesh.place.local(self.model)
        self.graphs = graphs.policy(str(config["graphs"]), local)
        self.kernels = select.choose(at).replaced(self.graphs.kernels, self.graphs.name)
        recipe = Recipe(
            str(config["attention"]), int(config.get("kv_splits", 1)), int(config["kda_chunk"]), self.kernels.functions
        )
        self.decoder = build_decoder(self.model, checkpoint, self.widths, recipe, mesh)
        self._admit(config)
        size = self.blocks.size
        # One slot more than sequences, for scoring an idle engine and for the padding of steps; one block for padding.
        self.decoder.attach(
            (self.blocks.count + 1) * size,
            self.scheduler.max_seqs + 1,
            str(config["kv_dtype"]),
            str(config["state_dtype"]),
        )

        make = Makers(
            lambda widths, index: build_layer(self.model, Reader(checkpoint, index, mesh), widths, index, recipe),
            lambda widths: build_head(self.model, checkpoint, widths, mesh),
        )
        self.lengths = by_length(self.decoder, self.widths, config, make)
        for decoder in self.lengths.decoders:
            self.graphs.bind(decoder)
        frame = Frame(size, self.scheduler.max_seqs, self.blocks.count)
        self.send = TRANSFERS[str(config.get("transfers", "plain"))]()
        self.run = self.lengths.steps(lambda decoder: self.graphs.steps(decoder, frame, self.send, config))
        self.stride = max(size, int(config["kda_chunk"]))
        self.load_seconds = time.monotonic() - start
        self._began = time.process_time()
        self._allocations = host.allocations()
        self._steps = dict.fromkeys(STEP_COUNTS, 0)

    def _admit(self, config: Mapping[str, Value]) -> None:
        """Who gets in, and what is kept of whom: all that the live knobs decide."""
        self.blocks = _blocks(self.model, config)
        self.scheduler = Scheduler(self.blocks, int(config["max_seqs"]), int(config["token_budget"]))

    def adopt(self, config: Mapping[str, Value]) -> dict[str, Any]:
        """Run ``config``, which differs in live knobs alone, with nothing kept; gives what runs now."""
        if self.busy:
            raise RuntimeError("adopt needs an idle engine; wait for the running requests")
        self.knobs = dict(config)
        self._admit(config)
        self.reset()
        return self.effective()

    def add(
        self,
        request_id: Hashable,
        prompt_ids: Ids[int],
        max_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        ignore_eos: bool = False,
    ) -> None:
        """Queue a request. Raises ValueError for one that can never run."""
        prompt = [int(token) for token in prompt_ids]
        check_request(prompt, max_tokens, self.model.vocab_size, self.blocks.count * self.blocks.size)
        self.scheduler.add(Sequence(request_id, prompt, len(prompt), max_tokens, temperature, seed, ignore_eos))

    def step(self) -> list[Event]:
        """One batch of decode and then prefill within the token budget; what each request got from it."""
        events: list[Event] = []
        decodes = self.scheduler.decodes()
        if decodes:
            events += self._decode(decodes)
        for sequence, count in self.scheduler.prefills(self.scheduler.token_budget - len(decodes)):
            for _, part in self.lengths.pieces(sequence.done, count):
                events += self._prefill(sequence, part)
        slots, empty = self.scheduler.slots_in_use()
        self._steps["steps"] += 1
        self._steps["kv_slot_steps"] += slots
        self._steps["kv_empty_slot_steps"] += empty
        self._steps["kv_peak_empty_slots"] = max(self._steps["kv_peak_empty_slots"], empty)
        return events

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def abort(self, request_id: Hashable) -> None:
        """Forget a request; unknown ones are ignored."""
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            if sequence.id == request_id:
                self.scheduler.finish(sequence)

    def reset(self) -> None:
        """Forget kept prefixes and counts."""
        self.blocks.clear()
        self._began = time.process_time()
        self._allocations = host.allocations()
        self._steps = dict.fromkeys(STEP_COUNTS, 0)
        self.run.reset()

    def _decode(self, sequences: list[Sequence]) -> list[Event]:
        logits = self.run(step_rows(sequences))
        self._steps["decode_tokens"] += len(sequences)
        for sequence in sequences:
            self.scheduler.advance(sequence, 1)
            if self.blocks.reuse and self.blocks.capacity and sequence.done % self.stride == 0:
                self.blocks.checkpoint(sequence.blocks[-1], self.decoder.save_state(sequence.slot))
        greedy = logits.argmax(-1).tolist()
        return [self._emit(s, logits[i], greedy[i]) for i, s in enumerate(sequences)]

    def _prefill(self, sequence: Sequence, count: int) -> list[Event]:
        start = sequence.done
        if start == 0:
            self.decoder.clear_state(sequence.slot)
        elif sequence.restore is not None:
            self.decoder.load_state(sequence.slot, sequence.restore)
            sequence.restore = None
        ids = torch.tensor(sequence.tokens[start : start + count])
        where = places(sequence.slot, sequence.blocks, self.blocks.size, start, count)
        at = Segment(sequence.slot, where, self._borders(start, count))
        logits, snapshots = self.lengths.at(start).prefill(ids, at)
        self.scheduler.advance(sequence, count)
        self._steps["prefill_tokens"] += count
        for border, snapshot in zip(at.borders, snapshots, strict=True):
            self.blocks.checkpoint(sequence.blocks[(start + border) // self.blocks.size - 1], snapshot)
        if sequence.done < len(sequence.tokens):
            return []
        return [self._emit(sequence, logits, int(logits.argmax()))]

    def _borders(self, start: int, count: int) -> tuple[int, ...]:
        """New-token counts after which the state is worth a checkpoint: the last borders of a block and a chunk
        that may be kept."""
        if not self.blocks.reuse or not self.blocks.capacity:
            return ()
        return tuple(range(self.stride - start % self.stride, count + 1, self.stride))[-self.blocks.capacity :]

    def _emit(self, sequence: Sequence, logits: Tensor, greedy: int) -> Event:
        token = greedy if sequence.temperature <= 0 else _draw(logits, sequence)
        sequence.tokens.append(token)
        finish = None
        if not sequence.ignore_eos and token in self.model.eos:
            finish = "stop"
        elif sequence.produced >= sequence.max_tokens:
            finish = "length"
        if finish:
            self.scheduler.finish(sequence)
        return sequence.id, (token,), finish

    def score(self, sequences: Ids[Ids[int]], top: int) -> list[Score]:
        """Teacher-forced scores, through the same kernels, widths and cache types as generation.

        Must not be called while requests run: it needs the whole cache for itself.
        """
        if self.busy:
            raise RuntimeError("score needs an idle engine; wait for the running requests")
        return [self._score(list(ids), min(top, self.model.vocab_size)) for ids in sequences]

    def _score(self, ids: list[int], top: int) -> Score:
        room = self.blocks.count * self.blocks.size
        if not 2 <= len(ids) <= room:
            raise ValueError(f"a scored sequence needs 2 to {room} tokens, not {len(ids)}")
        slot, rows = self.scheduler.max_seqs, []
        blocks = self.blocks.take(-(-len(ids) // self.blocks.size)) or []
        self.decoder.clear_state(slot)
        try:
            for start, count in self.lengths.pieces(0, len(ids) - 1, SCORE_ROWS):
                at = Segment(slot, places(slot, blocks, self.blocks.size, start, count))
                logits, _ = self.lengths.at(start).prefill(torch.tensor(ids[start : start + count]), at, every=True)
                logs = logits.log_softmax(-1)
                actual = logs.gather(1, torch.tensor(ids[start + 1 : start + count + 1])[:, None])[:, 0]
                best = logs.topk(top, -1)
                rows.append(tuple(t.cpu().numpy() for t in (actual, best.indices.to(torch.int32), best.values)))
        finally:
            self.blocks.release(blocks)
        return Score(*(np.concatenate(parts) for parts in zip(*rows, strict=True)))

    def effective(self) -> dict[str, Any]:
        """The knobs read back from the live parts, and what was really stored where."""
        from autotune.runtimes.native.inspect import effective

        return effective(self)

    def counters(self) -> dict[str, float]:
        """Counts since the last reset, bytes, and seconds of loading and compiling."""
        from autotune.runtimes.native.inspect import weight_bytes

        counts, size = self.blocks.counts, self.blocks.size
        checkpoints = sum(state.nbytes for state in self.blocks.states.values())
        sizes = {**self.decoder.cache_bytes(), "checkpoint": checkpoints}
        return {
            **{name: float(value) for name, value in self._steps.items()},
            "prefix_queries": float(counts.queries),
            "prefix_hits": float(counts.hits),
            "evictions": float(counts.evictions),
            "state_evictions": float(counts.state_evictions),
            "preemptions": float(counts.preemptions),
            "recomputed_tokens": float(counts.recomputed),
            "kv_tokens": float(self.blocks.count * size),
            "kv_used_tokens": float(self.blocks.used * size),
            "kv_kept_tokens": float((self.blocks.count - self.blocks.used - len(self.blocks.free)) * size),
            "kv_peak_tokens": float(counts.peak_blocks * size),
            "weight_bytes": float(sum(weight_bytes(*self.lengths.decoders).values())),
            "cache_bytes": float(sum(sizes.values())),
            **{f"{kind}_bytes": float(nbytes) for kind, nbytes in sizes.items()},
            "peak_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
            "cpu_seconds": time.process_time() - self._began,
            "load_seconds": self.load_seconds,
            "compile_seconds": self.graphs.seconds,
            **self.run.counters(),
            **{name: value - self._allocations.get(name, 0.0) for name, value in host.allocations().items()},
            **host.held(),
        }


def _blocks(model: ModelConfig, config: Mapping[str, Value]) -> Blocks:
    """Of ``kv_tokens``, with as many recurrent states as fit ``state_cache_mib``, at most one a block."""
    size = int(config["block_size"])
    count, room = int(config["kv_tokens"]) // size, int(config.get("state_cache_mib", 1024)) << 20
    states = min(room // max(state_bytes(model, str(config["state_dtype"])), 1), count)
    return Blocks(count, size, bool(config["prefix_reuse"]), states)


def _draw(logits: Tensor, sequence: Sequence) -> int:
    """A token at the sequence's temperature; the draw depends only on its seed and position, never on the batch."""
    source = torch.Generator(logits.device).manual_seed(sequence.seed * 1_000_003 + sequence.produced)
    weights = (logits / sequence.temperature).softmax(-1)
    return int(torch.multinomial(weights, 1, generator=source))
