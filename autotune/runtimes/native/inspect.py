"""What an engine really runs, read back from its live parts rather than from the request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from autotune.runtimes.native import host
from autotune.runtimes.native.attention import LatentAttention
from autotune.runtimes.native.capture import CapturedSteps
from autotune.runtimes.native.kernels import tuning
from autotune.runtimes.native.model import Decoder, LinearAttention
from autotune.runtimes.native.moe import MLP
from autotune.runtimes.native.quant.bias import Biased
from autotune.runtimes.native.quant.linear import Linear, Stored

if TYPE_CHECKING:
    from autotune.runtimes.native.engine import Engine

EIGHT_KERNELS = {"weight_only": "int8", "int8_token": "int8_token", "int8_tensor": "int8_both"}
KERNEL_BITS = {"fp32": 16, "bf16": 16, "int8": 8, "int8_both": 8, "int8_token": 8, "int4": 4}
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int8: "int8"}


def packed(decoder: Decoder) -> Iterator[tuple[str, Linear]]:
    """(``<layer>.<group>``, weight) of everything that a width applies to."""
    for index, layer in enumerate(decoder.layers, decoder.start):
        for name in packed_parts(layer.attention):
            yield f"{index}.attention", layer.attention.parts[name]
        groups: dict[str, Sequence[MLP]] = {"dense": [layer.mlp]} if isinstance(layer.mlp, MLP) else {}
        if not isinstance(layer.mlp, MLP):
            groups = {"experts": layer.mlp.experts, "shared": [layer.mlp.shared]}
        for group, mlps in groups.items():
            for mlp in mlps:
                yield f"{index}.{group}", mlp.gate_up
                yield f"{index}.{group}", mlp.down
    if decoder.head is not None:  # another pipeline stage has it
        yield "lm_head", decoder.head


def packed_parts(attention: LinearAttention | LatentAttention) -> tuple[str, ...]:
    """The parts of an attention that a width applies to."""
    return ("qkv", "o") if isinstance(attention, LinearAttention) else ("a", "q_b", "o")


def weight_bytes(*decoders: Decoder) -> dict[str, int]:
    """Bytes held by each group of quantizable weights and by the embedding; what decoders share counts once."""
    found = {"embedding": decoders[0].embed.nbytes} if decoders[0].embed is not None else {}
    for key, linear in {id(linear): (key, linear) for d in decoders for key, linear in packed(d)}.values():
        group = key.split(".")[-1]
        found[group] = found.get(group, 0) + linear.nbytes
    return found


def effective(engine: Engine) -> dict[str, Any]:
    """Knobs as they run. A width that a weight's shape did not allow shows in ``bits_stored``, not in its knob."""
    decoder, config = engine.decoder, dict[str, Any](engine.knobs)
    linear = next((a for layer in decoder.layers if isinstance(a := layer.attention, LinearAttention)), None)
    latent = next((a for layer in decoder.layers if isinstance(a := layer.attention, LatentAttention)), None)
    weights = [weight for d in engine.lengths.decoders for _, weight in packed(d)]
    kernels = {weight.kernel for weight in weights}
    if latent is not None and latent.pool is not None:
        config["attention"] = latent.form
        if "kv_splits" in config:
            config["kv_splits"] = latent.splits
        config["kv_dtype"] = NAMES[latent.pool.latent.dtype]
    if linear is not None and linear.pool is not None:
        config["kda_chunk"] = linear.chunk
        config["state_dtype"] = NAMES[linear.pool.state.dtype]
    plain = [weight.inner if isinstance(weight, Biased) else weight for weight in weights]
    computes = {weight.compute for weight in plain if isinstance(weight, Stored)}
    if len(computes) == 1:
        config["compute"] = computes.pop()
    eight = next((name for name, kernel in EIGHT_KERNELS.items() if kernel in kernels), None)
    if "activations" in config and eight is not None:
        config["activations"] = eight
    if "bits_compensation" in config:
        config["bits_compensation"] = "none" if engine.widths.means is None else "bias"
    if "bits_long" in config and engine.lengths.long is None:
        config["bits_long"] = 0
    if engine.lengths.long is not None:
        config["bits_long_from"] = engine.lengths.start
        config["bits_stored_long"] = _stored(engine.lengths.long)
    no_triton = {"products=triton": engine.products} if engine.products else {}
    table = getattr(decoder.embed, "part", decoder.embed)
    if table is not None:
        config["embed_on"] = "device" if table.weight.device == engine.send.device else "cpu"
    if isinstance(engine.run, CapturedSteps):
        config["graph_shapes"] = [list(engine.run.buckets.rows), list(engine.run.buckets.blocks)]
    config |= {
        "graphs": engine.graphs.name,
        "transfers": engine.send.name,
        "allocator": host.applied(),
        "prefix_reuse": engine.blocks.reuse,
        "block_size": engine.blocks.size,
        "kv_tokens": engine.blocks.count * engine.blocks.size,
        "max_seqs": engine.scheduler.max_seqs,
        "token_budget": engine.scheduler.token_budget,
        "threads": torch.get_num_threads(),
        "kernels": ",".join(sorted(kernels)),
        "kernel_backends": {**engine.kernels.backends, "products": "stored" if engine.products else "triton"},
        "kernel_refusals": {**engine.kernels.refusals, **no_triton},
        "bits_stored": _stored(decoder),
        "kernel_tuning": dict(sorted(tuning.current().said.items())),
    }
    return config


def _stored(decoder: Decoder) -> dict[str, int]:
    """The widest width really stored of each layer's group."""
    found = {"embedding": decoder.embed.bits} if decoder.embed is not None else {}
    for key, linear in packed(decoder):
        found[key] = max(found.get(key, 0), KERNEL_BITS[linear.kernel])
    return found
