"""The "sluice" section of a host's config, and the environment variable that overrides it.

    "sluice": {"enabled": true, "chunks": 4}

An absent key or `null` means: chosen by Sluice. The word "auto" is refused because some trainers rewrite it.
Loads no library: it is read in every process that builds an engine.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple, Union

from sluice import restore
from sluice.errors import InvalidArgument

ENVIRONMENT = "SLUICE"
POLICIES = ("error", "warn")
WGRAD_MODES = ("deferred", "per_chunk")
CHUNKINGS = ("adaptive", "tokens")
GROUPINGS = ("adaptive", "off", "on")
ACCUMULATE = ("in_place", "autograd")
TRANSPORTS = ("tcp", "c10d")
WIRE_DTYPES = ("bf16", "int8")
GEMMS = ("native", "ref", "onednn", "blas", "host")
CLIP_NORMS = ("stock", "true")
TUNER_MODES = ("adaptive", "profile", "model")
PIPELINE_POLICIES = ("adaptive", "message_driven", "backward_first", "1f1b_hint", "1f1b", "gpipe", "zero_bubble")
# They need more than one virtual stage on a rank; a pipeline engine's module has one part of the layers there.
_POLICIES_OF_SEVERAL_STAGES = ("looped", "v")
CALIBRATION_SECONDS = 8.0
MOST_SECONDS = 1e9  # 31 years: more are not counted in nanoseconds
MAX_CHUNKS = 256
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
# Of dispatched rows and of pre-activations, each for all chunks or by chunk.
Policy = tuple[Union[str, tuple[str, ...]], Union[str, tuple[str, ...]]]


class ConfigError(InvalidArgument):
    """The section cannot be used as it is; the message names the key, the value and what to write."""


class TunerOptions(NamedTuple):
    """Who decides n, and by what (docs/tuning.md).

    machine    path of a machine's JSON, for predictions; a profile's name; "device": the profile of the GPU's name
    calibrate  seconds: this machine is measured before the first layer, or taken from the cache
    cache      folder of measured machines; None: the user's
    decisions  path of a file of decisions that this run begins with and leaves its own in; True: one in `cache`
    pinned     path of decisions that must be there and good, alike on all ranks; never written
    """

    mode: str = "adaptive"
    machine: str | None = None
    calibrate: float | None = None
    cache: str | None = None
    decisions: str | bool | None = None
    pinned: str | None = None


ADAPTIVE_PLAN = "adaptive"


class PipelineOptions(NamedTuple):
    """How the stages of a pipeline engine are run (docs/deepspeed-pipeline.md).

    policy     what a stage runs next of what is ready, by its name in docs/pipeline.md
    in_flight  L: forwards of a stage whose backward has not run; None: chosen from what the first batch measured
    weight_apart  weight gradients of linear layers are ops of their own; None: the policy's
    plan       path of a plan of layers over stages, or of a model to plan; ADAPTIVE_PLAN: layers move where that pays;
               None: as the host has cut them
    memory_budget  bytes of each stage that the plan may take
    """

    policy: str = "adaptive"
    in_flight: int | None = None
    plan: str | None = None
    memory_budget: int | None = None
    weight_apart: bool | None = None

    @property
    def is_apart(self) -> bool:
        """Whether weight gradients are ops of their own."""
        return self.policy == "zero_bubble" if self.weight_apart is None else self.weight_apart


class PlacementOptions(NamedTuple):
    """When experts change ranks (docs/placement.md).

    interval          steps between two looks at the loads
    target            no more is wanted than a fullest rank with so many times the least rows that it can have
    least_gain        share of a layer's time that a move must save
    horizon           steps for which loads are believed to stay: a move must save more in them than it takes
    bytes_per_second  that a rank sends of experts while it trains, None: as fast as the link takes them
    """

    interval: int = 20
    target: float = 1.05
    least_gain: float = 0.05
    horizon: int = 500
    bytes_per_second: int | None = None


@dataclass(frozen=True)
class Options:
    """What the section says, checked. None = chosen by Sluice.

    required, shared_*: not of the section. A budget that several contexts share is what shared_* says; the budget
    itself is then one context's share.
    """

    chunks: int | None = None
    wgrad_mode: str | None = None
    chunking: str | None = None
    gemm: str | None = None
    gemm_library: str | None = None
    timeout: float | None = None
    on_unsupported: str = "error"
    required: bool = False
    policy: Policy | None = None
    reuse: bool = False
    memory_budget: int | None = None
    host_memory_budget: int | None = None
    max_outstanding: int | None = None
    tuner: TunerOptions | None = None
    deduplicate: bool | str = False  # "node": once to each node; "adaptive": to each rank or node
    ranks_per_node: int | None = None
    wire_dtype: str | None = None  # of WIRE_DTYPES; None: rows travel as they are
    transport: str | None = None
    accumulate: str | None = None
    gradient_pool: int | None = None
    optimizer: bool = False
    pipeline: PipelineOptions | None = None
    placement: PlacementOptions | None = None
    grouping: str | None = None
    clip_norm: str | None = None  # of CLIP_NORMS; None: stock's
    shared_memory_budget: int | None = None
    shared_host_memory_budget: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for comparing ranks and for messages."""
        return asdict(self)

    def policy_name(self) -> str:
        """The policy for people: "S4", or "offload + keep", by chunk "keep/offload + keep"; "adaptive" if none is
        asked for."""
        if self.policy is None:
            return "adaptive"
        words = (one if isinstance(one, str) else "/".join(one) for one in self.policy)
        return restore.set_name(self.policy) or " + ".join(words)

    def plan_message(self) -> str:
        """How passes will be cut and what reaches the backward, for banners: "chunks 4 | policy S4"."""
        words = [f"chunks {'adaptive' if self.chunks is None else self.chunks}"]
        if self.policy is not None:
            words.append(f"policy {self.policy_name()}")
        elif self.reuse:
            words.append("buffers reused, policy chosen among S1 to S4")
        elif self.memory_budget is not None:
            words.append("policy chosen to fit")
        for name, value in (("memory_budget", self.memory_budget), ("host_memory_budget", self.host_memory_budget)):
            if value is not None:
                words.append(f"{name} {bytes_text(value)}")
        if self.deduplicate:
            by = {"node": " by node", "adaptive": " by rank or by node"}
            words.append(f"deduplicated{by.get(self.deduplicate, '')}")
        if self.wire_dtype is not None:
            words.append(f"f32 rows travel in {self.wire_dtype}")
        return " | ".join(words)


def bytes_text(value: int) -> str:
    """A number of bytes for people: "20 GiB", "12.5 MiB"."""
    unit, factor = next(((name, UNITS[name]) for name in ("GiB", "MiB", "KiB") if value >= UNITS[name]), ("B", 1))
    return f"{value / factor:.4g} {unit}"


# Keys whose value may be an object, and what that one may hold. Where keys may come from is in origins.py.
NESTED = {
    "policy": ("input", "pre_activation"),
    "tuner": TunerOptions._fields,
    "pipeline": ("enabled", *PipelineOptions._fields),
    "placement": PlacementOptions._fields,
}
_NO_KEYS = ("required", "shared_memory_budget", "shared_host_memory_budget")
KEYS = ("enabled", *(field.name for field in fields(Options) if field.name not in _NO_KEYS))


def parse(section: Any) -> tuple[bool, Options]:
    """(enabled, options) of a section; ConfigError names the first thing that is wrong."""
    if not isinstance(section, Mapping):
        raise not_an_object(section)
    for key in section:
        check_key(key)
    values: dict[str, Any] = {}
    for key, check in _CHECKS.items():
        value = section.get(key)
        if isinstance(value, str) and value.strip().lower() == "auto":
            raise ConfigError(
                f'"sluice": "{key}": the word "auto" is not used here, because some trainers rewrite it: '
                "leave the key out or write null and Sluice chooses"
            )
        if value is not None:
            values[key] = check(key, value)
    if "policy" in values:
        values["policy"] = _for_chunks(values["policy"], values.get("chunks"))
    enabled = bool(values.pop("enabled", False))
    if values.get("reuse") and values.get("policy") is not None:
        raise ConfigError(
            '"sluice": "reuse" has Sluice choose among S1 to S4, and "policy" names one: take one of them out '
            "(a policy reuses buffers by itself)"
        )
    if "gemm_library" in values and values.get("gemm") not in ("onednn", "blas"):
        raise ConfigError('"sluice": "gemm_library" needs "gemm": "onednn" or "blas" beside it')
    return enabled, Options(**values)


def resolve(section: Any, environ: Mapping[str, str] | None = None) -> Options | None:
    """What to do for a host whose config has this section (None: has none); None = leave the host alone.

    SLUICE=0 switches off whatever the config says, without reading it. SLUICE=1 switches on. SLUICE=require switches
    on and makes everything that would not run on Sluice an error. Anything else is an error.
    """
    word = switch(environ)
    if word == "0":
        return None
    enabled, options = parse({} if section is None else section)
    if not enabled and not word:
        return None
    if word == "require":
        return Options(**{**options.as_dict(), "on_unsupported": "error", "required": True})
    return options


def switch(environ: Mapping[str, str] | None = None) -> str:
    """The word in the environment: "", "0", "1" or "require"."""
    word = (os.environ if environ is None else environ).get(ENVIRONMENT, "").strip().lower()
    if word not in ("", "0", "1", "require"):
        raise ConfigError(f"{ENVIRONMENT}={word!r} is not known: write 0, 1 or require, or unset it")
    return word


def misspelt_section(keys: Any) -> str | None:
    """A top-level key that looks like a misspelt "sluice"; DeepSpeed ignores unknown ones without a word."""
    names = [key for key in keys if isinstance(key, str) and key != "sluice"]
    found = difflib.get_close_matches("sluice", [name.lower() for name in names], n=1, cutoff=0.8)
    return next((name for name in names if name.lower() == found[0]), None) if found else None


def not_an_object(section: Any) -> ConfigError:
    return ConfigError(f'"sluice" must be an object such as {{"enabled": true}}, not {section!r}')


def check_key(key: Any) -> None:
    """Refuses what is no key of the section."""
    if key in KEYS:
        return
    near = difflib.get_close_matches(str(key).lower(), KEYS, n=1, cutoff=0.0)
    raise ConfigError(f'"sluice": unknown key {key!r}: did you mean "{near[0]}"? Valid keys: {", ".join(KEYS)}')


def check_nested(key: str, value: Mapping[Any, Any]) -> None:
    """Refuses what is no key of the object that `key` may be."""
    unknown = [name for name in value if name not in NESTED[key]]
    if unknown:
        raise ConfigError(f'"sluice": "{key}" has no key {unknown[0]!r}: known are {", ".join(NESTED[key])}')


def _boolean(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f'"sluice": "{key}" must be true or false, not {value!r}')
    return value


def _deduplicate(key: str, value: Any) -> bool | str:
    if value in ("node", "adaptive"):
        return value
    if not isinstance(value, bool):
        raise ConfigError(f'"sluice": "{key}" must be true, false, "node" or "adaptive", not {value!r}')
    return value


def _chunks(key: str, value: Any) -> int | None:
    if value == "adaptive":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_CHUNKS:
        raise ConfigError(f'"sluice": "{key}" must be 1 to {MAX_CHUNKS} (a whole number) or "adaptive", not {value!r}')
    return value


def _one_of(allowed: tuple[str, ...]) -> Callable[[str, Any], str]:
    def check(key: str, value: Any) -> str:
        if value not in allowed:
            lower = {name.lower(): name for name in allowed}
            near = difflib.get_close_matches(str(value).lower(), lower, n=1, cutoff=0.5)
            hint = f'; did you mean "{lower[near[0]]}"?' if near else ""
            raise ConfigError(f'"sluice": "{key}" must be one of {", ".join(allowed)}, not {value!r}{hint}')
        return str(value)

    return check


def _is_path(value: Any) -> bool:
    """Whether a file can have that name."""
    try:
        return isinstance(value, str) and bool(value) and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def _text(key: str, value: Any) -> str:
    if not _is_path(value):
        raise ConfigError(f'"sluice": "{key}" must be a path, not {value!r}')
    return str(value)


def _seconds(key: str, value: Any) -> float:
    # `not (0 < value ...)` refuses NaN as well.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MOST_SECONDS:
        most = f"{MOST_SECONDS:.0e}"
        raise ConfigError(f'"sluice": "{key}" must be a number of seconds above 0, at most {most}, not {value!r}')
    return float(value)


def _for_chunks(policy: Policy | None, chunks: int | None) -> Policy | None:
    """Lists have one entry for each chunk; one of equal entries is the same as the word."""
    if policy is None:
        return None
    for name, one in zip(("input", "pre_activation"), policy):
        if isinstance(one, str) or len(one) == chunks:
            continue
        remedy = f"give {chunks}" if chunks else f'write "chunks": {len(one)} beside it'
        raise ConfigError(
            f'"sluice": "policy.{name}" names {len(one)} chunks, and "chunks" is {chunks or "adaptive"}: {remedy}'
        )
    first, second = (one[0] if not isinstance(one, str) and len(set(one)) == 1 else one for one in policy)
    return first, second


def _by_chunk(allowed: tuple[str, ...]) -> Callable[[str, Any], str | tuple[str, ...]]:
    """A word, or a list of them, one for each chunk."""
    one_of = _one_of(allowed)

    def check(key: str, value: Any) -> str | tuple[str, ...]:
        if not isinstance(value, (list, tuple)):
            return one_of(key, value)
        if not value:
            raise ConfigError(f'"sluice": "{key}" is an empty list: name a policy for each chunk, or one for all')
        return tuple(one_of(f"{key}[{index}]", item) for index, item in enumerate(value))

    return check


def _policy(key: str, value: Any) -> Policy | None:
    """(restore of dispatched rows, restore of pre-activations); None leaves the choice to Sluice."""
    if value == "adaptive":
        return None
    if isinstance(value, str):
        return restore.SETS[_one_of(tuple(restore.SETS))(key, value)]
    if not isinstance(value, Mapping):
        names = ", ".join(restore.SETS)
        raise ConfigError(
            f'"sluice": "{key}" must be "adaptive", one of {names}, or '
            f'{{"input": ..., "pre_activation": ...}}, not {value!r}'
        )
    check_nested(key, value)
    given = {**dict(zip(NESTED[key], restore.KEPT)), **value}
    return (
        _by_chunk(tuple(restore.INPUT))(f"{key}.input", given["input"]),
        _by_chunk(tuple(restore.PRE_ACTIVATION))(f"{key}.pre_activation", given["pre_activation"]),
    )


def _tuner(key: str, value: Any) -> TunerOptions:
    if not isinstance(value, Mapping):
        raise ConfigError(f'"sluice": "{key}" must be an object with keys of {", ".join(NESTED[key])}, not {value!r}')
    check_nested(key, value)
    given = {name: item for name, item in value.items() if item is not None}
    if "mode" in given:
        _one_of(TUNER_MODES)(f"{key}.mode", given["mode"])
    if given.get("decisions") == "auto":
        raise ConfigError(
            f'"sluice": "{key}.decisions": the word "auto" is not used here, because some trainers rewrite it: '
            "write true for a file in the cache folder, or a path"
        )
    if isinstance(given.get("decisions"), bool):
        given["decisions"] = given["decisions"] or None
    elif "decisions" in given:
        _text(f"{key}.decisions", given["decisions"])
    for name in ("machine", "cache", "pinned"):
        if name in given:
            _text(f"{key}.{name}", given[name])
    if isinstance(given.get("calibrate"), bool):
        given["calibrate"] = CALIBRATION_SECONDS if given["calibrate"] else None
    elif "calibrate" in given:
        given["calibrate"] = _seconds(f"{key}.calibrate", given["calibrate"])
    found = TunerOptions(**given)
    if found.machine is not None and found.calibrate is not None:
        raise ConfigError(f'"sluice": "{key}" has machine and calibrate: take one of them out')
    if found.decisions is not None and found.pinned is not None:
        raise ConfigError(f'"sluice": "{key}" has decisions and pinned: take one of them out')
    if found.mode == "model" and found.machine is None and found.calibrate is None:
        raise ConfigError(f'"sluice": "{key}.mode" "model" needs a machine to predict with: add "calibrate": true')
    return found


def _pipeline(key: str, value: Any) -> PipelineOptions | None:
    """None: the host keeps its schedules."""
    if not isinstance(value, Mapping):
        raise ConfigError(f'"sluice": "{key}" must be an object such as {{"enabled": true}}, not {value!r}')
    check_nested(key, value)
    given = {name: item for name, item in value.items() if item is not None}
    if not _boolean(f"{key}.enabled", given.pop("enabled", True)):
        return None
    if "policy" in given:
        _pipeline_policy(f"{key}.policy", given["policy"])
    if "weight_apart" in given:
        _boolean(f"{key}.weight_apart", given["weight_apart"])
        if given.get("policy") == "zero_bubble" and not given["weight_apart"]:
            raise ConfigError(f'"sluice": "{key}.weight_apart" is false, and policy zero_bubble needs it: take one out')
    if given.get("in_flight") == "adaptive":
        del given["in_flight"]
    elif "in_flight" in given:
        _count(f"{key}.in_flight", given["in_flight"])
    if "plan" in given:
        if given["plan"] == "auto":
            raise ConfigError(
                f'"sluice": "{key}.plan": the word "auto" is not used here, because some trainers rewrite it: write '
                f'the path of a plan, or "{ADAPTIVE_PLAN}"'
            )
        _text(f"{key}.plan", given["plan"])
    if "memory_budget" in given:
        given["memory_budget"] = _bytes(f"{key}.memory_budget", given["memory_budget"])
        if "plan" not in given:
            raise ConfigError(
                f'"sluice": "{key}.memory_budget" bounds a plan: add "plan" with a path or "{ADAPTIVE_PLAN}" beside it'
            )
    return PipelineOptions(**given)


def _pipeline_policy(key: str, value: Any) -> None:
    if value in _POLICIES_OF_SEVERAL_STAGES:
        raise ConfigError(
            f'"sluice": "{key}" "{value}" needs several stages on a rank, and DeepSpeed\'s PipelineModule has one part '
            f"of the layers there: take one of {', '.join(PIPELINE_POLICIES)}"
        )
    _one_of(PIPELINE_POLICIES)(key, value)


def _placement(key: str, value: Any) -> PlacementOptions | None:
    """None: experts stay where the host put them."""
    if value in ("fixed", "adaptive"):
        return PlacementOptions() if value == "adaptive" else None
    if not isinstance(value, Mapping):
        names = ", ".join(NESTED[key])
        raise ConfigError(
            f'"sluice": "{key}" must be "adaptive", "fixed", or an object with keys of {names}, not {value!r}'
        )
    check_nested(key, value)
    given = {name: item for name, item in value.items() if item is not None}
    for name in ("interval", "horizon"):
        if name in given:
            _count(f"{key}.{name}", given[name])
    if "target" in given:
        given["target"] = _number(f"{key}.target", given["target"], 1.0, 1e6)
    if "least_gain" in given:
        given["least_gain"] = _number(f"{key}.least_gain", given["least_gain"], 0.0, 0.99)
    if "bytes_per_second" in given:
        given["bytes_per_second"] = _bytes(f"{key}.bytes_per_second", given["bytes_per_second"])
    return PlacementOptions(**given)


def _number(key: str, value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ConfigError(f'"sluice": "{key}" must be a number from {least:g} to {most:g}, not {value!r}')
    return float(value)


def _bytes(key: str, value: Any) -> int:
    """A number of bytes, or text with a unit: "20GiB", "1.5 GB"."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value) if isinstance(value, str) else None
    if found and (found[2] or "B") in UNITS and float(found[1]) < 1 << 63:
        value = int(float(found[1]) * UNITS[found[2] or "B"])
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 63:
        units = ", ".join(UNITS)
        raise ConfigError(f'"sluice": "{key}" must be bytes, or text such as "20GiB" (units: {units}), not {value!r}')
    return value


def _bytes_or_none(key: str, value: Any) -> int:
    """The same, or false: 0."""
    return 0 if value is False else _bytes(key, value)


def _count(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
        raise ConfigError(f'"sluice": "{key}" must be a whole number above 0, not {value!r}')
    return value


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "enabled": _boolean,
    "chunks": _chunks,
    "wgrad_mode": _one_of(WGRAD_MODES),
    "chunking": _one_of(CHUNKINGS),
    "grouping": _one_of(GROUPINGS),
    "policy": _policy,
    "reuse": _boolean,
    "memory_budget": _bytes,
    "host_memory_budget": _bytes,
    "max_outstanding": _count,
    "tuner": _tuner,
    "deduplicate": _deduplicate,
    "ranks_per_node": _count,
    "wire_dtype": _one_of(WIRE_DTYPES),
    "accumulate": _one_of(ACCUMULATE),
    "gradient_pool": _bytes_or_none,
    "optimizer": _boolean,
    "clip_norm": _one_of(CLIP_NORMS),
    "pipeline": _pipeline,
    "placement": _placement,
    "gemm": _one_of(GEMMS),
    "gemm_library": _text,
    "transport": _one_of(TRANSPORTS),
    "timeout": _seconds,
    "on_unsupported": _one_of(POLICIES),
}
