"""Every metric, declared once, and how each is derived from request timelines. Knows nothing of how those were taken.

Seconds, bytes and counts inside; units are for whoever prints. A figure that cannot be computed is absent, never zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

COUNTED = (
    "peak_bytes", "weight_bytes", "cache_bytes", "kv_bytes", "state_bytes", "checkpoint_bytes", "graph_bytes",
    "evictions", "state_evictions", "preemptions",
    "communication_share", "communication_bytes", "page_faults", "device_allocations",
)  # fmt: skip
"""The engine's own counts that are metrics as they are."""
SHARES = {
    "prefix_hit_rate": ("prefix_hits", "prefix_queries"),
    "acceptance_rate": ("accepted", "drafted"),
    "kv_peak_fraction": ("kv_peak_tokens", "kv_tokens"),
    "kv_fragmentation": ("kv_empty_slot_steps", "kv_slot_steps"),
    "kv_fragmentation_peak": ("kv_peak_empty_slots", "kv_tokens"),
    "recomputed_fraction": ("recomputed_tokens", "prefill_tokens"),
    "padding_share": ("graph_padding_rows", "graph_rows"),
    "device_fragmentation": ("device_unallocated_bytes", "device_reserved_bytes"),
}
"""Metrics that are one of the engine's counts as a share of another."""
FASTEST = 1e6
"""Output tokens a second above which a measurement is a fault of the clock or the stream, not a speed."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """One request as the client saw it; all times are seconds since the run began.

    ``token_times``: one per output token (tokens of one engine step share a time). ``error`` is empty for a request
    that ended well; a failed one keeps the tokens it got, but its times are in no figure.
    """

    conversation: int
    turn: int
    prompt_tokens: int
    output_tokens: int
    sent: float
    token_times: tuple[float, ...]
    error: str = ""

    @property
    def ttft(self) -> float | None:
        """Seconds from sending to the first token; None if none came."""
        return self.token_times[0] - self.sent if self.token_times else None

    @property
    def end(self) -> float | None:
        """When the last token came; None if none came."""
        return self.token_times[-1] if self.token_times else None

    @property
    def e2e(self) -> float | None:
        """Seconds from sending to the last token; None if none came."""
        return self.token_times[-1] - self.sent if self.token_times else None

    @property
    def gaps(self) -> tuple[float, ...]:
        """Seconds between one token and the next."""
        return tuple(b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False))

    @property
    def tpot(self) -> float | None:
        """(e2e − ttft) / (tokens − 1), seconds a token after the first; None below two tokens."""
        n = len(self.token_times)
        return (self.token_times[-1] - self.token_times[0]) / (n - 1) if n > 1 else None

    @property
    def fault(self) -> str:
        """Why this is no successful request: its error, or times that cannot be; empty if it is one."""
        times = self.token_times
        if self.error:
            return self.error
        if not times:
            return "the stream ended without a token"
        if len(times) != self.output_tokens:
            return f"{self.output_tokens} output tokens but {len(times)} token times"
        if not all(math.isfinite(t) for t in (self.sent, *times)):
            return "a time is not finite"
        if times[0] < self.sent or any(gap < 0 for gap in self.gaps):
            return "a token came before the request, or before the token before it"
        if times[-1] - self.sent < len(times) / FASTEST:
            return f"{len(times)} tokens in {times[-1] - self.sent:.2g} s is faster than any engine"
        return ""


@dataclass(frozen=True, slots=True)
class Metric:
    """``better`` is ``lower``, ``higher`` or empty for a figure that only describes; ``format`` is a format spec."""

    name: str
    unit: str
    better: str
    format: str
    sentence: str


FAMILIES = ("ttft", "itl", "tpot", "e2e", "task")
"""What is measured many times in a run, in seconds: of these any percentile can be asked for."""
PERCENTILES = (50, 90, 95, 99)


def _spread_of(name: str, what: str) -> list[Metric]:
    shapes = [("mean", "Mean"), ("p50", "Median"), *((f"p{q}", f"{q}th percentile of the") for q in PERCENTILES[1:])]
    return [Metric(f"{name}_{suffix}", "s", "lower", ".4g", f"{words} {what}.") for suffix, words in shapes]


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        *_spread_of("ttft", "time from sending a request to its first token"),
        *_spread_of("itl", "time between two tokens of a request, over all gaps"),
        *_spread_of("tpot", "time per output token after the first, over requests"),
        *_spread_of("e2e", "time from sending a request to its last token"),
        *_spread_of("task", "time from a conversation's first request to its last token")[:3],
        Metric("tasks_per_min", "1/min", "higher", ".4g", "Conversations finished a minute."),
        Metric("output_tok_s", "tok/s", "higher", ".4g", "Output tokens of good requests a second of the run."),
        Metric("total_tok_s", "tok/s", "higher", ".4g", "Prompt and output tokens of good requests a second."),
        Metric("requests_s", "1/s", "higher", ".4g", "Good requests a second of the run."),
        Metric("goodput_req_s", "1/s", "higher", ".4g", "Good requests inside the SLO a second of the run."),
        Metric("slo_fraction", "1", "higher", ".2%", "Share of all requests that are good and inside the SLO."),
        Metric("failed_fraction", "1", "lower", ".2%", "Share of requests that failed or were cut off."),
        Metric("requests", "1", "", ".0f", "Requests sent, failed ones included."),
        Metric("wall_s", "s", "lower", ".4g", "Length of the run, first request to last token."),
        Metric("engine_cpu_s", "s", "lower", ".4g", "CPU time that the engine spent on the run."),
        Metric("client_cpu_fraction", "1", "lower", ".2%", "CPU time of the load generator a second of the run."),
        Metric("peak_bytes", "B", "lower", ".4g", "The most memory that the engine held."),
        Metric("weight_bytes", "B", "lower", ".4g", "Memory of the weights as stored."),
        Metric("cache_bytes", "B", "lower", ".4g", "Memory of the KV cache and recurrent states."),
        Metric("kv_bytes", "B", "lower", ".4g", "Memory of the KV pool: latents, index keys and their scales."),
        Metric("state_bytes", "B", "lower", ".4g", "Memory of the recurrent states of running sequences."),
        Metric("checkpoint_bytes", "B", "lower", ".4g", "Memory of recurrent states kept for prefix reuse."),
        Metric("padding_share", "1", "lower", ".2%", "Share of the rows of replayed steps that were padding."),
        Metric("graph_bytes", "B", "lower", ".4g", "Device memory that captured graphs hold."),
        Metric("page_faults", "1", "lower", ".0f", "Fresh pages that allocating touched in the run (CPU)."),
        Metric("device_allocations", "1", "lower", ".0f", "Blocks that the device allocator handed out in the run."),
        Metric("device_fragmentation", "1", "lower", ".2%", "Share of reserved device memory that no tensor held."),
        Metric("prefix_hit_rate", "1", "higher", ".2%", "Share of looked-up prompt tokens found in the prefix cache."),
        Metric("acceptance_rate", "1", "higher", ".2%", "Share of drafted tokens that the model accepted."),
        Metric("evictions", "1", "lower", ".0f", "Kept prefix blocks given up for new tokens."),
        Metric("state_evictions", "1", "lower", ".0f", "Kept recurrent states given up, for memory or with blocks."),
        Metric("kv_peak_fraction", "1", "lower", ".2%", "The most of the KV pool that running sequences held at once."),
        Metric("kv_fragmentation", "1", "lower", ".2%", "Share of held KV slots without a token, over all steps."),
        Metric("kv_fragmentation_peak", "1", "lower", ".2%", "The most held KV slots without a token, of the pool."),
        Metric("recomputed_fraction", "1", "lower", ".2%", "Share of prefilled tokens computed before a preemption."),
        Metric("preemptions", "1", "lower", ".0f", "Sequences put back because the cache ran out."),
        Metric("communication_s", "s", "lower", ".4g", "Time of the slowest rank in exchanges of tensors."),
        Metric("communication_share", "1", "lower", ".2%", "Exchanges as a share of the time that ranks work."),
        Metric("communication_bytes", "B", "lower", ".4g", "Tensors that the ranks of a layout exchanged."),
        Metric("kl_mean", "nat", "lower", ".4g", "Mean KL divergence a token from the full-width model."),
        Metric("perplexity", "1", "lower", ".4g", "Perplexity on the held-out text."),
        Metric("device_s_per_ktok", "s", "lower", ".4g", "Seconds of one device for 1,000 output tokens: the cost."),
        Metric("op_s", "s", "lower", ".4g", "Median time of one call of an operator (on a CPU, of its thread)."),
        Metric("op_error", "1", "lower", ".2g", "Error of an operator's answer relative to the reference's norm."),
        Metric("perplexity_ratio", "1", "lower", ".4f", "Perplexity relative to the full-width model's."),
    )
}


def percentile(values: Sequence[float], q: float) -> float:
    """The ``q``-th percentile (0–100) by linear interpolation between order statistics, as `numpy.percentile` does.

    Rank (n − 1) q / 100 of the sorted values (Hyndman and Fan 1996, definition 7). Raises ValueError when empty.
    """
    if not values or not 0 <= q <= 100:
        raise ValueError(f"a percentile needs values and 0 <= q <= 100, not {len(values)} values and q={q}")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * q / 100
    low = min(math.floor(rank), len(ordered) - 1)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def derive(
    timelines: Sequence[Timeline],
    wall_seconds: float,
    cpu_seconds: float | None = None,
    slo: Mapping[str, float] | None = None,
    counters: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """The metrics of one run, by name; only finite ones.

    ``wall_seconds``: length of the run; ``cpu_seconds``: the client's own CPU time; ``slo``: see `meets`;
    ``counters``: the engine's own counts. Failed requests count in ``failed_fraction`` and nowhere else.
    """
    good = [t for t in timelines if not t.fault]
    found: dict[str, float | None] = {}
    if timelines:
        found |= {"requests": len(timelines), "failed_fraction": 1 - len(good) / len(timelines)}
    for name in FAMILIES:
        found |= _spread(name, observed(name, timelines))
    tasks = _tasks(timelines)
    if math.isfinite(wall_seconds) and wall_seconds > 0:
        found |= _rates(good, len(tasks), wall_seconds)
        if cpu_seconds is not None:
            found["client_cpu_fraction"] = cpu_seconds / wall_seconds
        if slo and timelines:
            inside = sum(meets(t, slo) for t in good)
            found |= {"goodput_req_s": inside / wall_seconds, "slo_fraction": inside / len(timelines)}
    found |= _counted(counters or {})
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}


def observed(family: str, timelines: Sequence[Timeline]) -> list[float]:
    """Every observation of one of FAMILIES in the good requests (of ``task``: in wholly good conversations)."""
    if family == "task":
        return _tasks(timelines)
    good = [t for t in timelines if not t.fault]
    if family == "itl":
        return [gap for t in good for gap in t.gaps]
    return [value for t in good if (value := getattr(t, family)) is not None]


def meets(timeline: Timeline, slo: Mapping[str, float]) -> bool:
    """Whether a good request kept every limit, in seconds: ttft, tpot, itl (its longest gap between tokens), e2e.

    A figure that it has not (no second token) breaks none.
    """
    figures = {
        "ttft": timeline.ttft,
        "tpot": timeline.tpot,
        "itl": max(timeline.gaps, default=None),
        "e2e": timeline.e2e,
    }
    return all(value is None or value <= slo[name] for name, value in figures.items() if name in slo)


def _tasks(timelines: Sequence[Timeline]) -> list[float]:
    """Seconds of each conversation whose every turn ended well."""
    turns: dict[int, list[Timeline]] = {}
    for timeline in timelines:
        turns.setdefault(timeline.conversation, []).append(timeline)
    return [
        max(t.token_times[-1] for t in mine) - min(t.sent for t in mine)
        for mine in turns.values()
        if not any(t.fault for t in mine)
    ]


def _spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {}
    figures: dict[str, float | None] = {f"{name}_mean": math.fsum(values) / len(values)}
    for q in PERCENTILES:
        if f"{name}_p{q}" in METRICS:
            figures[f"{name}_p{q}"] = percentile(values, q)
    return figures


def _rates(good: Sequence[Timeline], tasks: int, wall: float) -> dict[str, float | None]:
    output = sum(t.output_tokens for t in good)
    if output / wall > FASTEST:
        return {}
    figures: dict[str, float | None] = {"wall_s": wall}
    if good:
        figures["output_tok_s"] = output / wall
        figures["total_tok_s"] = (output + sum(t.prompt_tokens for t in good)) / wall
        figures["requests_s"] = len(good) / wall
    if tasks:
        figures["tasks_per_min"] = 60 * tasks / wall
    return figures


def _counted(counters: Mapping[str, float]) -> dict[str, float | None]:
    figures: dict[str, float | None] = {"engine_cpu_s": counters.get("cpu_seconds")}
    figures["communication_s"] = counters.get("communication_seconds")
    for name in COUNTED:
        figures[name] = counters.get(name)
    for name, (part, whole) in SHARES.items():
        if counters.get(whole, 0) > 0:
            figures[name] = counters.get(part, 0) / counters[whole]
    return figures
