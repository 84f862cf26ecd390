"""Where options may come from: one table of all keys of the "sluice" section, nested ones by their path.

Who runs a program writes its ds_config, its environment, its specs of layers and its calls of `sluice.configure`. A
model's own config comes with the model, and who downloads one runs nothing of its author's (transformers'
`trust_remote_code=False`). So a model may say how its layers are cut, and nothing that loads code, opens files, reaches
the network or waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from sluice import config

DS_CONFIG = "ds_config"
CONFIGURE = "sluice.configure"
ENVIRONMENT = "SLUICE_OPTIONS"
SPEC = "the layer's spec"  # of Megatron-Core: `sluice.megatron.with_sluice(spec, ...)`
MODEL = "the model's own config"

USER = frozenset((DS_CONFIG, CONFIGURE, ENVIRONMENT, SPEC))
ANYONE = USER | {MODEL}


class Rule(NamedTuple):
    """may_come_from: origins; why: what the key can do, which is why these and no others."""

    may_come_from: frozenset[str]
    why: str


_NO_OTHER_PIPELINE = "it runs the schedules of a DeepSpeed pipeline engine, which no other host has"
_NO_OTHER_PLACEMENT = "it moves the experts of a DeepSpeed engine, which no other host has"

TABLE = {
    "enabled": Rule(ANYONE, "it leaves layers to the host, with the same results"),
    "chunks": Rule(ANYONE, "it changes times, not results"),
    "wgrad_mode": Rule(ANYONE, "it changes times, not results"),
    "chunking": Rule(ANYONE, "it changes times and bytes, not results"),
    "grouping": Rule(ANYONE, "it changes times and bytes, not results"),
    "policy": Rule(ANYONE, "it changes times and bytes, not results"),
    "policy.input": Rule(ANYONE, "it changes times and bytes, not results"),
    "policy.pre_activation": Rule(ANYONE, "it changes times and bytes, not results"),
    "reuse": Rule(ANYONE, "it changes times and bytes, not results"),
    "memory_budget": Rule(ANYONE, "a bound; where nothing fits, an error says so"),
    "host_memory_budget": Rule(ANYONE, "a bound; what does not fit is computed again"),
    "max_outstanding": Rule(ANYONE, "it divides a budget"),
    "deduplicate": Rule(ANYONE, "it changes what travels, and last bits"),
    "ranks_per_node": Rule(ANYONE, "it says where ranks are, which changes what travels, and last bits"),
    "wire_dtype": Rule(USER, "it rounds what travels between ranks, beyond last bits"),
    "accumulate": Rule(ANYONE, "who adds gradients, with the same sums up to rounding"),
    "gradient_pool": Rule(ANYONE, "it changes times and bytes, not results"),
    "optimizer": Rule(
        frozenset((DS_CONFIG, SPEC)),
        "it computes the optimizer of a DeepSpeed engine, or what Megatron-Core offloads, which no other host has",
    ),
    "clip_norm": Rule(frozenset((DS_CONFIG,)), "it is the norm of a DeepSpeed engine, which no other host has"),
    "pipeline": Rule(frozenset((DS_CONFIG,)), "it must be an object, whose keys have rules of their own"),
    "pipeline.enabled": Rule(frozenset((DS_CONFIG,)), _NO_OTHER_PIPELINE),
    "pipeline.policy": Rule(frozenset((DS_CONFIG,)), _NO_OTHER_PIPELINE),
    "pipeline.in_flight": Rule(frozenset((DS_CONFIG,)), _NO_OTHER_PIPELINE),
    "pipeline.weight_apart": Rule(frozenset((DS_CONFIG,)), _NO_OTHER_PIPELINE),
    "placement": Rule(frozenset((DS_CONFIG,)), _NO_OTHER_PLACEMENT),
    "placement.interval": Rule(frozenset((DS_CONFIG,)), _NO_OTHER_PLACEMENT),
    "placement.target": Rule(frozenset((DS_CONFIG,)), _NO_OTHER_PLACEMENT),
    "placement.least_gain": Rule(frozenset((DS_CONFIG,)), _NO_OTHER_PLACEMENT),
    "placement.horizon": Rule(frozenset((DS_CONFIG,)), _NO_OTHER_PLACEMENT),
    "placement.bytes_per_second": Rule(frozenset((DS_CONFIG,)), _NO_OTHER_PLACEMENT),
    "pipeline.plan": Rule(frozenset((DS_CONFIG,)), "it names a file to read"),
    "pipeline.memory_budget": Rule(frozenset((DS_CONFIG,)), _NO_OTHER_PIPELINE),
    "on_unsupported": Rule(ANYONE, "an error or a warning; transformers' own layers run in either case"),
    "gemm": Rule(USER, "it has a library of this machine loaded"),
    "gemm_library": Rule(USER, "it names code to load"),
    "transport": Rule(USER, "it chooses the network connections between ranks"),
    "timeout": Rule(USER, "it says how long ranks wait for a lost one"),
    "tuner": Rule(USER, "it must be an object, whose keys have rules of their own"),
    "tuner.mode": Rule(ANYONE, "how chunks are chosen"),
    "tuner.machine": Rule(USER, "it names a file to read"),
    "tuner.calibrate": Rule(USER, "it measures for as long as it says, and writes into a folder"),
    "tuner.cache": Rule(USER, "it names a folder to write into"),
    "tuner.decisions": Rule(USER, "it names a file to read and write"),
    "tuner.pinned": Rule(USER, "it names a file to read"),
}


def taken(section: Any, origin: str) -> dict[str, Any]:
    """A copy of a section (None: empty), all of whose keys may come from there; ConfigError names those that may not.

    Who uses the section uses the copy: a mapping of any other kind could show other keys when it is asked again.
    """
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise config.not_an_object(section)
    copied = _copied(section)
    refused = [path for path in _paths(copied) if origin not in TABLE[path].may_come_from]
    if refused:
        raise config.ConfigError(_refusal(refused, origin))
    return copied


def _copied(section: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key): _copied(value) if isinstance(value, Mapping) else value for key, value in section.items()}


def _paths(section: dict[str, Any]) -> Iterator[str]:
    """The rules that a section falls under; unknown keys are errors here as in any section."""
    for key, value in section.items():
        config.check_key(key)
        if key in config.NESTED and isinstance(value, dict):
            config.check_nested(key, value)
            yield from (f"{key}.{name}" for name in value)
        else:
            yield key


def _refusal(refused: list[str], origin: str) -> str:
    named = ", ".join(f'"{path}" ({TABLE[path].why})' for path in refused)
    if origin != MODEL:
        allowed = ", ".join(sorted(TABLE[refused[0]].may_come_from)) or "nowhere"
        return f'"sluice": {named} cannot come from {origin}: "{refused[0]}" may come from {allowed}'
    calls = ", ".join(_as_argument(path) for path in refused)
    return (
        f'"sluice": {named} cannot come from {origin} (the section "sluice" of its config.json, config.sluice), which '
        f"may be a stranger's: take it out there. If you want it, give it yourself: sluice.configure({calls}) before "
        f"the first call, {ENVIRONMENT} in the environment, or {DS_CONFIG} for DeepSpeed's layers and sluice's tools"
    )


def _as_argument(path: str) -> str:
    key, dot, name = path.partition(".")
    return f'{key}={{"{name}": ...}}' if dot else f"{key}=..."
