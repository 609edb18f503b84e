"""llama.cpp's space: the arguments of its server, and the type of each kind of weight in the file that it is given.

Facts are of b11549; nothing here launches it.
"""

from __future__ import annotations

from search_spaces.domain import Choice, Int, Pow2, Value
from search_spaces.space import Facts, Knob, Rule, Space

TYPES = ("f32", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
GROUPS = ("attention", "dense", "experts", "shared", "embedding", "lm_head")


def _threads(value: Value, facts: Facts) -> str:
    cores = int(facts.get("cores", 1 << 20))
    return f"0 means all {cores} cores, and more threads than cores wait for each other" if int(value) >= cores else ""


def _layers(value: Value, facts: Facts) -> str:
    layers = int(facts.get("layers", 1 << 20))
    return f"the model has {layers} layers" if 2 * int(value) >= layers else ""


KNOBS = (
    Knob("flash_attn", "attention", Choice(("on", "off")), "on",
         "Attention in one pass over the cache instead of by whole matrices; which is faster depends on the length.",
         flag="--flash-attn"),
    *(
        Knob(f"type_{group}", "bits", Choice(TYPES), "f16", f"Type of the {group} weights in the GGUF file.",
             quality=True, restart="reload")
        for group in GROUPS
    ),
    Knob("wide_first", "bits", Int(0, 2), 0, "First layers whose weights stay in f16.", refuse=_layers, quality=True,
         restart="reload"),
    Knob("wide_last", "bits", Int(0, 2), 0, "Last layers whose weights stay in f16.", refuse=_layers, quality=True,
         restart="reload"),
    Knob("cache_type", "cache", Choice(("f32", "f16", "q8_0", "q4_0")), "f16",
         "Type of the cached latents and of the indexer's keys.", quality=True, flag="--cache-type-k"),
    Knob("cache_prompt", "cache", Choice((True, False)), True,
         "Reuse what a slot still holds of an earlier prompt.", flag="--cache-prompt"),
    Knob("cache_ram", "cache", Choice((0, 1024, 8192), ordered=True), 8192,
         "MiB of host memory for the prompts that left their slots.", flag="--cache-ram"),
    Knob("repack", "kernel", Choice((True, False)), True,
         "Rearrange narrow weights for this CPU's matrix instructions at load.", flag="--repack"),
    Knob("mmap", "kernel", Choice((True, False)), True, "Map the file instead of reading it.", flag="--mmap"),
    Knob("parallel", "scheduler", Pow2(1, 32), 4, "Slots: sequences served together.", flag="--parallel"),
    Knob("batch_size", "scheduler", Pow2(128, 4096), 2048, "Tokens of one step.", flag="--batch-size"),
    Knob("ubatch_size", "scheduler", Pow2(32, 2048), 512, "Tokens that go through the layers at once.",
         flag="--ubatch-size"),
    Knob("threads", "scheduler", Choice((0, 1, 2, 3, 4, 6, 8, 12, 16), ordered=True), 0,
         "CPU threads; 0 is one a core.", refuse=_threads, flag="--threads"),
)  # fmt: skip

RULES = (
    Rule("ubatch", "ubatch_size must not be larger than batch_size",
         lambda c, facts: int(c["ubatch_size"]) > int(c["batch_size"])),
    Rule("ram without cache", "cache_ram keeps nothing without cache_prompt, so it is 0 there",
         lambda c, facts: not c["cache_prompt"] and int(c["cache_ram"]) > 0),
    Rule("narrow cache", "a cache_type of q8_0 or q4_0 needs flash_attn=on",
         lambda c, facts: str(c["cache_type"]).startswith("q") and c["flash_attn"] != "on"),
    Rule("slots", "batch_size must hold a token of each slot",
         lambda c, facts: int(c["batch_size"]) < int(c["parallel"])),
)  # fmt: skip

SPACE = Space(
    "llamacpp", KNOBS, RULES,
    reference={**{f"type_{group}": "f32" for group in GROUPS}, "cache_type": "f32", "wide_first": 0, "wide_last": 0},
)  # fmt: skip
