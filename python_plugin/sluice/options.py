# SPDX-License-Identifier: Apache-2.0
"""Defines the table of options: every key of the "sluice" section, in the order of the manual.

Each class below is a part of the table, and each field with `option(...)` is a row: the key, its type and default, how
a value is read, where it may come from, which field of the C config holds it, and the text of the manual. These parts
derive from the table: `sluice.config.parse`, `sluice.origins`, the output of `sluice doctor` and banners, the C configs
(sluice.adapters.torch.options.fill), and the tables in docs (python_plugin/packaging/option_tables.py). To add an
option, add a row here, and use the value.

This module loads no library, since every process that builds an engine imports it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Union

from sluice import option_values as values
from sluice import restore
from sluice.option_values import ConfigError, bytes_text

# Where an option may come from. The user writes all of these except the model's own config, which comes with the model.
# So a model may set how its layers are cut, but nothing that loads code, opens files, uses the network or waits.
DS_CONFIG = "ds_config"
CONFIGURE = "sluice.configure"
ENVIRONMENT = "SLUICE_OPTIONS"
SPEC = "the layer's spec"  # of Megatron-Core: `sluice.megatron.with_sluice(spec, ...)`
MODEL = "the model's own config"
USER = frozenset((DS_CONFIG, CONFIGURE, ENVIRONMENT, SPEC))
ANYONE = USER | {MODEL}
ENGINE = frozenset((DS_CONFIG,))

# Restore policies of dispatched rows and of pre-activations, each for all chunks or by chunk.
Policy = tuple[Union[str, tuple[str, ...]], Union[str, tuple[str, ...]]]


@dataclass(frozen=True)
class Row:
    """Has the entry of a key in the table, in addition to its type and default.

    read           checks a value of the section, and returns the value of the field
    may_come_from  origins
    why            the effect of the key that explains why it may come from these origins
    values, unset, meaning  cells of the manual: allowed values, behaviour without the key, effect of the key
    c              the field of the C config; None: Python uses the option
    numbers        maps values to numbers of the C config; None: the value itself, 0 if absent
    transformers   the manual's text for transformers, if the origins do not say enough
    banner         the text of a value in banners; None: only `sluice doctor` shows the value
    shown          doctor's word instead of the key
    parts          keys of the object that the value may be
    """

    read: values.Reader
    may_come_from: frozenset[str]
    why: str
    values: str
    unset: str
    meaning: str
    c: str | None = None
    numbers: Mapping[Any, int] | None = None
    transformers: str | None = None
    banner: Callable[[Any], str] | None = None
    shown: str | None = None
    parts: Mapping[str, Row] = field(default_factory=dict)


def option(
    read: values.Reader,
    may_come_from: frozenset[str],
    why: str,
    values: str,
    unset: str,
    meaning: str,
    *,
    default: Any = None,
    **more: Any,
) -> Any:
    """Returns a field of the section. See Row."""
    return field(default=default, metadata={"row": Row(read, may_come_from, why, values, unset, meaning, **more)})


def internal(c: str | None = None, default: Any = None) -> Any:
    """Returns a field that only adapters set. It is not a key of the section. c: see Row."""
    return field(default=default, metadata={"c": c})


def by_name(cls: type) -> Any:
    """Makes all arguments of a dataclass keyword-only, as `kw_only` does, which Python 3.9 does not have."""
    made = cls.__init__  # type: ignore[misc]

    @functools.wraps(made)
    def __init__(self: Any, *unnamed: Any, **given: Any) -> None:
        if unnamed:
            raise TypeError(f"{cls.__name__} takes options by name: write the name of {unnamed[0]!r} before it")
        made(self, **given)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def rows_of(cls: type) -> dict[str, Row]:
    """Returns the rows of one part of the table, by key."""
    return {each.name: each.metadata["row"] for each in fields(cls) if "row" in each.metadata}


def c_fields(cls: type) -> dict[str, tuple[str, Mapping[Any, int] | None]]:
    """Returns {field of this class: (field of the C config, numbers of its values)}."""
    found = {}
    for each in fields(cls):
        row = each.metadata.get("row")
        name = each.metadata.get("c") if row is None else row.c
        if name is not None:
            found[each.name] = (name, None if row is None else row.numbers)
    return found


_TIMES = "it changes times, not results"
_TIMES_AND_BYTES = "it changes times and bytes, not results"
_STAGES = "it runs the schedules of a DeepSpeed pipeline engine, which no other host has"
_MOVES = "it moves the experts of a DeepSpeed engine, which no other host has"
_BYTES = 'bytes, or `"20GiB"`'
_YES_NO = "`true`, `false`"


# ---- values that are objects ----

TUNER_MODES = ("adaptive", "profile", "model")
ADAPTIVE_PLAN = "adaptive"
PIPELINE_POLICIES = ("adaptive", "message_driven", "backward_first", "1f1b_hint", "1f1b", "gpipe", "zero_bubble")
# These policies need several virtual stages on a rank, but a pipeline engine's module has only one on each rank.
_POLICIES_OF_SEVERAL_STAGES = ("looped", "v")


@by_name
@dataclass(frozen=True)
class TunerOptions:
    """Sets how n is decided, and by which times (docs/tuning.md)."""

    mode: str = option(
        values.one_of(*TUNER_MODES), ANYONE, "how chunks are chosen", '`"adaptive"`, `"profile"`, `"model"`',
        "adaptive", "what decides, as above",
        default="adaptive", c="mode", numbers={name: number for number, name in enumerate(TUNER_MODES)},
    )  # fmt: skip
    machine: str | None = option(
        values.path, USER, "it names a file to read", 'a path, a profile\'s name, `"device"`', "none",
        'costs that predictions use; `"device"`: the profile with the name of the GPU',
    )  # fmt: skip
    calibrate: float | None = option(
        values.calibrate, USER, "it measures for as long as it says, and writes into a folder", "`true`, seconds",
        "not measured", "measure this machine before the first layer, or use its cached measurement",
    )  # fmt: skip
    cache: str | None = option(
        values.path, USER, "it names a folder to write into", "a path", "the user's", "folder of measured machines"
    )
    decisions: str | bool | None = option(
        values.path_or_true, USER, "it names a file to read and write", "a path, `true`", "none",
        "file of decisions that the run begins with and adds its own to; `true`: a file in `cache`",
    )  # fmt: skip
    pinned: str | None = option(
        values.path, USER, "it names a file to read", "a path", "none",
        "file of decisions that must exist and be valid, the same on all ranks; it is never written",
    )  # fmt: skip


def _pipeline_policy(key: str, value: Any) -> str:
    if value in _POLICIES_OF_SEVERAL_STAGES:
        raise ConfigError(
            f'"sluice": "{key}" "{value}" needs several stages on a rank, but DeepSpeed\'s PipelineModule has one '
            f"stage there: use one of {', '.join(PIPELINE_POLICIES)}"
        )
    return values.one_of(*PIPELINE_POLICIES)(key, value)


@by_name
@dataclass(frozen=True)
class PipelineOptions:
    """Sets how the stages of a pipeline engine run (docs/deepspeed-pipeline.md)."""

    policy: str = option(
        _pipeline_policy, ENGINE, _STAGES, ", ".join(f'`"{name}"`' for name in PIPELINE_POLICIES), "adaptive",
        "[what a stage runs next](pipeline.md#policies). Adaptive: `1f1b_hint`, then the fastest by the times of "
        "the first batch",
        default="adaptive",
    )  # fmt: skip
    in_flight: int | None = option(
        values.count_or_adaptive, ENGINE, _STAGES, 'a number, `"adaptive"`', "adaptive",
        "L: micro-batches of a stage whose activations are kept. Adaptive: the number of stages, then a number "
        "chosen from the times of the first batch",
    )  # fmt: skip
    plan: str | None = option(
        values.path_or_adaptive, ENGINE, "it names a file to read", 'the path of a plan, `"adaptive"`', "none",
        "[which layer](#a-plan-of-layers-by-key) runs on which stage, and which are recomputed; adaptive: layers "
        "[move by themselves](#layers-that-move-by-themselves)",
    )  # fmt: skip
    memory_budget: int | None = option(
        values.number_of_bytes, ENGINE, _STAGES, _BYTES, "none", "memory that this plan may use on each stage"
    )
    offload: str | None = option(
        values.path, ENGINE, "it names a folder to write to", '`"host"`, the path of a folder', '`"host"`',
        "where offloaded layers copy their saved tensors: host memory, or a file in this folder on each rank",
    )  # fmt: skip
    separate_wgrad: bool | None = option(
        values.boolean, ENGINE, _STAGES, _YES_NO, "`true` under `zero_bubble`, else `false`",
        "weight gradients of linear layers are separate ops ([below](#separate-weight-gradients))",
    )  # fmt: skip

    @property
    def is_apart(self) -> bool:
        """Returns whether weight gradients are separate ops."""
        return self.policy == "zero_bubble" if self.separate_wgrad is None else self.separate_wgrad


@by_name
@dataclass(frozen=True)
class PlacementOptions:
    """Sets when experts change ranks (docs/placement.md)."""

    interval: int = option(values.count, ENGINE, _MOVES, "a number", "20", "steps between two checks", default=20)
    target: float = option(
        values.number(1.0, 1e6), ENGINE, _MOVES, "1 or more", "1.05",
        "moves end once the rank with the most rows has at most this many times the lower bound",
        default=1.05,
    )  # fmt: skip
    least_gain: float = option(
        values.number(0.0, 0.99), ENGINE, _MOVES, "0 to 0.99", "0.05",
        "share of a layer's time that a move must save",
        default=0.05,
    )  # fmt: skip
    horizon: int = option(
        values.count, ENGINE, _MOVES, "a number", "500", "steps in which a move must save more time than it takes",
        default=500,
    )  # fmt: skip
    bytes_per_second: int | None = option(
        values.number_of_bytes, ENGINE, _MOVES, 'bytes, or `"50MB"`', "as fast as the link allows",
        "bytes of experts that a rank sends during a step",
    )  # fmt: skip


def _tuner(key: str, value: Any) -> TunerOptions:
    rows = rows_of(TunerOptions)
    if not isinstance(value, Mapping):
        raise ConfigError(f'"sluice": "{key}" must be an object with keys of {", ".join(rows)}, not {value!r}')
    found = TunerOptions(**values.parts(key, value, {name: row.read for name, row in rows.items()}))
    if found.machine is not None and found.calibrate is not None:
        raise ConfigError(f'"sluice": "{key}" has machine and calibrate: remove one of them')
    if found.decisions is not None and found.pinned is not None:
        raise ConfigError(f'"sluice": "{key}" has decisions and pinned: remove one of them')
    if found.mode == "model" and found.machine is None and found.calibrate is None:
        raise ConfigError(f'"sluice": "{key}.mode" "model" needs a machine to predict with: add "calibrate": true')
    return found


_PIPELINE = {
    "enabled": Row(
        values.boolean, ENGINE, _STAGES, _YES_NO, "`true`", "`false`: the host's own schedules"
    ),
    **rows_of(PipelineOptions),
}  # fmt: skip


def _pipeline(key: str, value: Any) -> PipelineOptions | None:
    """Reads the object. None: the host keeps its schedules."""
    if not isinstance(value, Mapping):
        raise ConfigError(f'"sluice": "{key}" must be an object such as {{"enabled": true}}, not {value!r}')
    given = values.parts(key, value, {name: row.read for name, row in _PIPELINE.items()})
    if not given.pop("enabled", True):
        return None
    found = PipelineOptions(**given)
    if found.policy == "zero_bubble" and not found.is_apart:
        raise ConfigError(
            f'"sluice": "{key}.separate_wgrad" is false, but policy zero_bubble needs it: remove one of them'
        )
    if found.memory_budget is not None and found.plan is None:
        raise ConfigError(
            f'"sluice": "{key}.memory_budget" bounds a plan: also set "plan" to a path or "{ADAPTIVE_PLAN}"'
        )
    if found.offload is not None and found.plan in (None, ADAPTIVE_PLAN):
        raise ConfigError(
            f'"sluice": "{key}.offload" is only for a plan from a file: set "plan" to a path, or remove this key'
        )
    return found


def _placement(key: str, value: Any) -> PlacementOptions | None:
    """Reads the object. None: experts stay where the host put them."""
    rows = rows_of(PlacementOptions)
    if value in ("fixed", "adaptive"):
        return PlacementOptions() if value == "adaptive" else None
    if not isinstance(value, Mapping):
        names = ", ".join(rows)
        raise ConfigError(
            f'"sluice": "{key}" must be "adaptive", "fixed", or an object with keys of {names}, not {value!r}'
        )
    return PlacementOptions(**values.parts(key, value, {name: row.read for name, row in rows.items()}))


_RESTORE = {
    "input": Row(
        values.by_chunk(*restore.INPUT), ANYONE, _TIMES_AND_BYTES, ", ".join(f'`"{name}"`' for name in restore.INPUT),
        restore.KEPT[0], "how dispatched rows reach the backward",
    ),
    "pre_activation": Row(
        values.by_chunk(*restore.PRE_ACTIVATION), ANYONE, _TIMES_AND_BYTES,
        ", ".join(f'`"{name}"`' for name in restore.PRE_ACTIVATION),
        restore.KEPT[1], "how pre-activations reach the backward",
    ),
}  # fmt: skip


def _policy(key: str, value: Any) -> Policy | None:
    """Returns (restore of dispatched rows, restore of pre-activations); None leaves the choice to Sluice."""
    if value == "adaptive":
        return None
    if isinstance(value, str):
        return restore.SETS[values.one_of(*restore.SETS)(key, value)]
    if not isinstance(value, Mapping):
        names = ", ".join(restore.SETS)
        raise ConfigError(
            f'"sluice": "{key}" must be "adaptive", one of {names}, or '
            f'{{"input": ..., "pre_activation": ...}}, not {value!r}'
        )
    values.check_parts(key, value, _RESTORE)
    given = {**dict(zip(_RESTORE, restore.KEPT)), **value}
    first, second = (row.read(f"{key}.{name}", given[name]) for name, row in _RESTORE.items())
    return first, second


# ---- the keys of the section ----

ENABLED = Row(
    values.boolean, ANYONE, "it leaves layers to the host, with the same results", _YES_NO, "`false`", "the switch",
    transformers="default `true`",
)  # fmt: skip


@by_name
@dataclass(frozen=True)
class LayerOptions:
    """Sets how the passes of a layer run. None: chosen by Sluice."""

    chunks: int | None = option(
        values.chunks, ANYONE, _TIMES, '1 to 256, `"adaptive"`', "adaptive",
        "n, the number of chunks in which rows travel and are computed; adaptive: [chosen while training](tuning.md), "
        "the same on all ranks",
        c="num_chunks",
        transformers="chosen with several ranks or a budget, else 1",
    )  # fmt: skip
    policy: Policy | None = option(
        _policy, ANYONE, _TIMES_AND_BYTES,
        '`"none"`, `"S1"` to `"S4"`, `{"input": …, "pre_activation": …}`, `"adaptive"`',
        "`none`; under a budget chosen to fit", "how rows reach the backward ([below](#restore-policies))",
        parts=_RESTORE,
        transformers="default: pre-activations kept, rows copied again from the tokens; `none` under expert "
        "parallelism",
    )  # fmt: skip
    reuse: bool = option(
        values.boolean, ANYONE, _TIMES_AND_BYTES, _YES_NO, "`false`",
        "no rows are kept: n and one of S1 to S4 are chosen together. Not with `policy`",
        default=False, c="reuse",
    )  # fmt: skip
    wgrad_mode: str | None = option(
        values.one_of("deferred", "per_chunk"), ANYONE, _TIMES, '`"deferred"`, `"per_chunk"`',
        "[chosen](tuning.md#what-is-chosen-by-whom-when)",
        "weight gradients once over all chunks, or chunk by chunk",
        c="wgrad_mode", numbers={None: -1, "adaptive": -1, "deferred": 0, "per_chunk": 1},
    )  # fmt: skip
    chunking: str | None = option(
        values.one_of("adaptive", "tokens"), ANYONE, _TIMES_AND_BYTES, '`"adaptive"`, `"tokens"`', "adaptive",
        "chunks by experts if everything is kept, or always by tokens, which takes less memory",
        c="chunking", numbers={None: 0, "adaptive": 0, "tokens": 1},
    )  # fmt: skip
    grouping: str | None = option(
        values.one_of("adaptive", "off", "on"), ANYONE, _TIMES_AND_BYTES, '`"adaptive"`, `"off"`, `"on"`', "adaptive",
        "rows of one chunk return in the same exchange that sends rows of a later chunk. Adaptive: if that is "
        "faster. Off under a budget and with `reuse`",
        c="grouping", numbers={None: 0, "adaptive": 0, "off": 1, "on": 2},
        transformers="under expert parallelism",
    )  # fmt: skip
    deduplicate: bool | str = option(
        values.deduplicate, ANYONE, "it changes what travels, and last bits",
        '`"adaptive"`, `true`, `false`, `"node"`, `"rank_or_node"`', "adaptive",
        'a token\'s row is sent once to each rank; `"node"`: once to each node; `"rank_or_node"`: the faster of both; '
        "`false`: once for each route ([c-abi.md](c-abi.md#deduplication)). Adaptive: [the fastest, by a machine and a "
        "race](tuning.md#rows-or-copies-of-tokens), which changes last bits; without a machine as `false`",
        default="adaptive", c="deduplicate",
        numbers={False: 0, True: 1, "node": 2, "rank_or_node": 3, "adaptive": 4},
        transformers="under expert parallelism",
        banner=lambda by: {
            True: "deduplicated", False: "not deduplicated", "node": "deduplicated by node"
        }.get(by, "deduplicated by rank or by node"),
    )  # fmt: skip
    accumulate: str | None = option(
        values.one_of("in_place", "autograd"), ANYONE, "what adds gradients, with the same sums up to rounding",
        '`"in_place"`, `"autograd"`', "in place",
        "what adds to an existing `.grad`: the library [where nothing can tell the "
        "difference](transformers.md#gradients-that-are-already-there), or always autograd",
        transformers="[below](#gradients-that-are-already-there)",
    )  # fmt: skip
    gradient_pool: int | None = option(
        values.bytes_or_false, ANYONE, _TIMES_AND_BYTES, 'bytes, or `"2GiB"`; `false`',
        "a quarter of the memory; none under a budget",
        "memory of released gradients that is [kept for the next "
        "ones](transformers.md#gradients-that-are-fresh-in-each-step)",
        transformers="[below](#gradients-that-are-fresh-in-each-step)",
    )  # fmt: skip


@by_name
@dataclass(frozen=True)
class ContextOptions:
    """Describes options that all layers of one model on one rank share. None: chosen by Sluice.

    gemm              may also be "auto"; on CUDA "auto", "cublas" or "cublas-tf32" (f32 GEMMs may round their operands
                      to TF32)
    shared_...        for messages: the budget that this context shares with others; None: it has its own budget
    num_layers        under a budget: how many layers will be made, some after the first forward; None: those that exist
    """

    memory_budget: int | None = option(
        values.number_of_bytes, ANYONE, "a bound; where nothing fits, an error says so", _BYTES, "no limit",
        "all that Sluice allocates on a rank stays below it. 8 MiB of it are for GEMMs, however small a layer is "
        "([what counts](concepts.md#the-budget-in-bytes))",
        c="memory_budget",
        transformers="of the experts layers of the process",
        banner=lambda value: f"memory_budget {bytes_text(value)}",
    )  # fmt: skip
    host_memory_budget: int | None = option(
        values.number_of_bytes, ANYONE, "a bound; what does not fit is computed again", _BYTES, "no limit of its own",
        "of offloaded rows (S1 to S3); chunks beyond it are sent and computed again. On a CPU they count towards "
        "`memory_budget` too",
        c="host_memory_budget",
        banner=lambda value: f"host_memory_budget {bytes_text(value)}",
    )  # fmt: skip
    max_outstanding: int | None = option(
        values.count, ANYONE, "it divides a budget", "a number", "one for each layer",
        "under a budget: forwards that wait for their backward at one time, over the whole model",
        c="max_outstanding",
    )  # fmt: skip
    ranks_per_node: int | None = option(
        values.count, ANYONE, "it says where ranks are, which changes what travels, and last bits", "a whole number",
        "by host names",
        'for `"node"` and `"adaptive"`: consecutive ranks of an expert-parallel group that share a node',
        c="ranks_per_node",
        transformers="under expert parallelism",
    )  # fmt: skip
    wire_dtype: str | None = option(
        values.one_of("bf16", "int8"), USER, "it rounds what travels between ranks, beyond last bits",
        '`"bf16"`, `"int8"`', "not converted",
        "rows of f32 layers, and their gradients, are sent in half or a quarter of the bytes, rounded "
        "([errors](c-abi.md#rows-in-fewer-bytes))",
        c="wire_dtype", numbers={None: 0, "bf16": 1, "int8": 2},
        banner=lambda value: f"f32 rows travel in {value}",
    )  # fmt: skip
    tuner: TunerOptions | None = option(
        _tuner, USER, "it must be an object, whose keys have rules of their own",
        '`{"mode": …, "machine": …, "calibrate": …, "cache": …, "decisions": …, "pinned": …}`',
        "mode adaptive, no machine",
        "how n is chosen, by which times, and what is kept from run to run ([tuning.md](tuning.md))",
        parts=rows_of(TunerOptions),
        transformers="only `mode` in a model's config",
    )  # fmt: skip
    gemm: str | None = option(
        values.one_of("native", "ref", "onednn", "blas", "host"), USER, "it has a library of this machine loaded",
        '`"native"`, `"ref"`, `"onednn"`, `"blas"`, `"host"`', "[measured](tuning.md#which-library-multiplies)",
        "library for GEMMs; name one if [bits](c-abi.md#numbers) must repeat",
        c="gemm",
    )  # fmt: skip
    gemm_library: str | None = option(
        values.path, USER, "it names code to load", "path", "the loader's search", "for `onednn` and `blas`",
        c="gemm_library",
    )  # fmt: skip
    shared_memory_budget: int | None = internal(c="shared_memory_budget")
    shared_host_memory_budget: int | None = internal(c="shared_host_memory_budget")
    num_layers: int | None = internal(c="num_layers")


@by_name
@dataclass(frozen=True)
class Options(ContextOptions, LayerOptions):
    """Has the checked options of the section. None: chosen by Sluice. required: SLUICE=require."""

    optimizer: bool = option(
        values.boolean, frozenset((DS_CONFIG, SPEC)),
        "it computes the optimizer of a DeepSpeed engine, or what Megatron-Core offloads, which no other host has",
        _YES_NO, "`false`", "DeepSpeed's Adam and AdamW on a CPU are computed by the library ([below](#the-optimizer))",
        default=False,
    )  # fmt: skip
    clip_norm: str | None = option(
        values.one_of("stock", "true"), ENGINE, "it is the norm of a DeepSpeed engine, which no other host has",
        '`"stock"`, `"true"`', "stock",
        "the norm by which f32 gradients are clipped without ZeRO ([below](#the-norm-that-clips))",
    )  # fmt: skip
    pipeline: PipelineOptions | None = option(
        _pipeline, ENGINE, "it must be an object, whose keys have rules of their own", "`{…}`",
        "the host's own schedules",
        "ops of a pipeline engine run as messages arrive ([deepspeed-pipeline.md](deepspeed-pipeline.md))",
        parts=_PIPELINE, shown="ops of a pipeline run as messages arrive",
    )  # fmt: skip
    placement: PlacementOptions | None = option(
        _placement, ENGINE, _MOVES, '`"adaptive"`, `"fixed"`, `{…}`', "fixed",
        "experts change ranks where their loads differ ([placement.md](placement.md#deepspeed))",
        parts=rows_of(PlacementOptions), shown="experts change ranks where loads differ",
    )  # fmt: skip
    transport: str | None = option(
        values.one_of("tcp", "c10d"), USER, "it chooses the network connections between ranks", '`"tcp"`, `"c10d"`',
        "tcp; c10d with a warning where ranks cannot connect",
        "what carries rows on the CPU: Sluice's own connections ([interfaces](environment.md)), or torch's c10d with "
        "gloo",
    )  # fmt: skip
    timeout: float | None = option(
        values.seconds, USER, "it says how long ranks wait for a lost one", "seconds", "that of the host's group",
        "a rank that is silent for this long is an error that names it",
    )  # fmt: skip
    on_unsupported: str = option(
        values.one_of("error", "warn"), ANYONE,
        "an error or a warning; transformers' own layers run in either case", '`"error"`, `"warn"`', "error",
        "what cannot be swapped is an error, or stays with DeepSpeed; callback experts that cannot do the `policy` "
        "run with `none`",
        default="error",
        transformers="of callback experts that cannot do the [`policy`](deepspeed.md#restore-policies)",
    )  # fmt: skip
    required: bool = internal(default=False)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values, for comparing ranks and for messages."""
        return asdict(self)

    def policy_name(self) -> str:
        """Returns the policy: "S4", or "offload + keep", by chunk "keep/offload + keep"; "adaptive" if none is set."""
        if self.policy is None:
            return "adaptive"
        words = (one if isinstance(one, str) else "/".join(one) for one in self.policy)
        return restore.set_name(self.policy) or " + ".join(words)

    def plan_message(self) -> str:
        """Returns the chunks and restore policies, for banners: "chunks 4 | policy S4"."""
        words = [f"chunks {'adaptive' if self.chunks is None else self.chunks}"]
        if self.policy is not None:
            words.append(f"policy {self.policy_name()}")
        elif self.reuse:
            words.append("buffers reused, policy chosen among S1 to S4")
        elif self.memory_budget is not None:
            words.append("policy chosen to fit")
        said = [row.banner(getattr(self, key)) for key, row in _KEYS.items() if row.banner and self._is_set(key)]
        return " | ".join(words + said)

    def full_message(self) -> str:
        """Returns `plan_message` and every other key that is set, for `sluice doctor`."""
        others = [key for key, row in _KEYS.items() if row.banner is None and key not in _IN_PLAN and self._is_set(key)]
        words = (f"{_KEYS[key].shown or key} {_text(getattr(self, key))}".rstrip() for key in others)
        return " | ".join([self.plan_message(), *words])

    def _is_set(self, key: str) -> bool:
        return bool(getattr(self, key) != _DEFAULTS[key])


def _text(value: Any) -> str:
    """Returns a value as text for people. For an object, the text has the keys that differ from their defaults."""
    if not dataclasses.is_dataclass(value):
        return str(value)
    given = {each.name: getattr(value, each.name) for each in fields(value)}
    words = [f"{each.name} {given[each.name]}" for each in fields(value) if given[each.name] != each.default]
    return f"({', '.join(words)})" if words else ""


_IN_PLAN = ("chunks", "policy", "reuse")
_KEYS = rows_of(Options)
_DEFAULTS = {each.name: each.default for each in fields(Options)}
# All keys of the section, and the paths of keys in objects.
TABLE: dict[str, Row] = {"enabled": ENABLED, **_KEYS}
PATHS: dict[str, Row] = {
    path: row
    for key, of_key in TABLE.items()
    for path, row in ((key, of_key), *((f"{key}.{name}", part) for name, part in of_key.parts.items()))
}
