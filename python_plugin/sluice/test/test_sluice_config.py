# SPDX-License-Identifier: Apache-2.0
"""Tests the "sluice" section and SLUICE without any host, the trace's file format, and the launcher's command line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sluice import config, options, run, trace


def test_PlanMessage_OfRowsThatTravel_SaysHow() -> None:
    for section, said in (
        ({"deduplicate": False}, "not deduplicated"),
        ({"deduplicate": "node"}, "deduplicated by node"),
        ({"deduplicate": "rank_or_node"}, "deduplicated by rank or by node"),
        ({"wire_dtype": "int8"}, "f32 rows travel in int8"),
    ):
        assert said in config.parse(section)[1].plan_message()
    assert "dedup" not in config.parse({})[1].plan_message()


def test_Reuse_IsReadAndChoosesThePolicyItself() -> None:
    assert config.parse({})[1].reuse is False
    _, options = config.parse({"reuse": True, "chunks": 4})
    assert options.reuse and options.policy is None
    assert options.plan_message() == "chunks 4 | buffers reused, policy chosen among S1 to S4"
    assert config.parse({"reuse": True, "policy": "adaptive"})[1].reuse  # which names none
    for policy in ("none", "S1", {"input": "offload"}):
        with pytest.raises(
            config.ConfigError, match='"reuse" has Sluice choose among S1 to S4, and "policy" names one'
        ):
            config.parse({"reuse": True, "policy": policy})
    with pytest.raises(config.ConfigError, match='"reuse" must be true or false'):
        config.parse({"reuse": "S1"})


@pytest.mark.parametrize("section", [{}, {key: None for key in config.KEYS}, {"chunks": "adaptive"}])
def test_Section_AbsentNullAndAdaptive_AreTheDefaults(section: dict[str, Any]) -> None:
    assert config.parse(section) == (False, config.Options())


def _of(key: str, *pairs: tuple[Any, Any]) -> list[tuple[dict[str, Any], str, Any]]:
    return [({key: written}, key, meant) for written, meant in pairs]


def _words(key: str, *words: Any) -> list[tuple[dict[str, Any], str, Any]]:
    return _of(key, *((word, word) for word in (*words, None)))


CALIBRATED = config.TunerOptions(mode="model", calibrate=config.CALIBRATION_SECONDS, cache="c")
MOVES = config.PlacementOptions(interval=20, target=1.05, least_gain=0.05, horizon=500)
# (section, key, what is read)
READ: list[tuple[dict[str, Any], str, Any]] = [
    *_words("transport", "c10d", "tcp"),
    *_words("accumulate", "autograd", "in_place"),
    *_words("wgrad_mode", "per_chunk", "deferred"),
    *_words("wire_dtype", "bf16", "int8"),
    *_words("grouping", "adaptive", "off", "on"),
    *_words("ranks_per_node", 8),
    *_words("chunking", "tokens"),
    *_of("gradient_pool", ("1.5 GiB", 3 << 29), (False, 0)),
    ({"enabled": True, "chunks": 4}, "chunks", 4),
    ({"gemm": "blas", "gemm_library": "/x.so"}, "gemm_library", "/x.so"),
    *_of("timeout", (5, 5.0)),
    *(({}, key, meant) for key, meant in (("reuse", False), ("gradient_pool", None), ("deduplicate", "adaptive"))),
    *(({"memory_budget": "1GiB", name: "1MiB"}, name, 1 << 20) for name in ("host_memory_budget", "memory_budget")),
    *_of("deduplicate", *((way, way) for way in (True, False, "node", "rank_or_node"))),
    *_of(
        "tuner",
        ({}, config.TunerOptions()),
        ({"mode": "model", "calibrate": True, "cache": "c", "machine": None}, CALIBRATED),
        ({"calibrate": 2, "decisions": "d.json"}, config.TunerOptions(calibrate=2.0, decisions="d.json")),
        ({"calibrate": False, "decisions": True}, config.TunerOptions(decisions=True)),
        ({"decisions": False, "pinned": "p.json"}, config.TunerOptions(pinned="p.json")),
    ),
    *_of(
        "pipeline",
        ({}, config.PipelineOptions(policy="adaptive", in_flight=None)),
        ({"enabled": True, "policy": None, "in_flight": "adaptive"}, config.PipelineOptions()),
        ({"policy": "gpipe", "in_flight": 4}, config.PipelineOptions(policy="gpipe", in_flight=4)),
        ({"policy": "zero_bubble"}, config.PipelineOptions(policy="zero_bubble")),
        ({"separate_wgrad": True}, config.PipelineOptions(separate_wgrad=True)),
        ({"plan": "adaptive"}, config.PipelineOptions(plan=config.ADAPTIVE_PLAN)),
        ({"plan": "p.json", "memory_budget": "1KiB"}, config.PipelineOptions(plan="p.json", memory_budget=1024)),
        ({"plan": "adaptive", "memory_budget": 9}, config.PipelineOptions(plan="adaptive", memory_budget=9)),
        ({"enabled": False, "policy": "gpipe"}, None),
        (None, None),
    ),
    *_of(
        "placement",
        ("adaptive", MOVES),
        ("fixed", None),
        (None, None),
        ({"interval": 7, "target": 2, "horizon": None}, replace(MOVES, interval=7, target=2.0)),
        ({"least_gain": 0}, replace(MOVES, least_gain=0.0)),
    ),
    *_of(
        "policy",
        ("none", ("keep", "keep")),
        ("S1", ("offload", "offload")),
        ("S4", ("redispatch", "recompute")),
        ({"pre_activation": "recompute"}, ("keep", "recompute")),
        ("adaptive", None),
        (None, None),
    ),
]


@pytest.mark.parametrize("section, key, meant", READ, ids=str)
def test_Section_EachForm_IsRead(section: dict[str, Any], key: str, meant: Any) -> None:
    assert getattr(config.parse(section)[1], key) == meant


@pytest.mark.parametrize("key", config.KEYS)
def test_Section_TheWordAuto_IsRefusedForEveryKey(key: str) -> None:
    with pytest.raises(config.ConfigError, match=f'"{key}": the word "auto"'):
        config.parse({key: "auto"})


@pytest.mark.parametrize(
    "written,meant,words",
    [
        (
            {"input": ["keep", "offload", "redispatch"], "pre_activation": "recompute"},
            (("keep", "offload", "redispatch"), "recompute"),
            "policy keep/offload/redispatch + recompute",
        ),
        (
            {"pre_activation": ["keep", "keep", "recompute"]},
            ("keep", ("keep", "keep", "recompute")),
            "keep + keep/keep/rec",
        ),
        ({"input": ["redispatch"] * 3, "pre_activation": ["recompute"] * 3}, ("redispatch", "recompute"), "policy S4"),
    ],
)
def test_Policy_ByChunk_IsReadAndNamed(written, meant, words):
    _, options = config.parse({"chunks": 3, "policy": written})
    assert options.policy == meant
    assert words in options.plan_message()


@pytest.mark.parametrize(
    "wrong, right",
    [("enable", "enabled"), ("Chunks", "chunks"), ("time_out", "timeout"), ("on_unsuported", "on_unsupported")],
)
def test_Section_MisspeltKey_IsNamedWithTheNearest(wrong: str, right: str) -> None:
    with pytest.raises(config.ConfigError, match=f"unknown key '{wrong}': did you mean \"{right}\""):
        config.parse({wrong: 1})


# Wrong values of a key, and the words of the error.
WRONG: list[tuple[str, Any, str]] = [
    *(("chunks", value, "") for value in (0, True, 2.0, "4")),
    *(("timeout", value, "") for value in (0, float("nan"), "30")),
    ("gemm", "cublas", ""),
    ("gemm_library", "x.so", ""),
    ("on_unsupported", "ignore", ""),
    ("enabled", 1, ""),
    *(("deduplicate", value, 'must be "adaptive", true, false, "node" or "rank_or_node"') for value in (1, "rank", [])),
    ("wire_dtype", "f8", ""),
    ("grouping", True, '"grouping" must be one of adaptive, off, on, not True'),
    ("transport", "gloo", ""),
    ("accumulate", "in-place", '"accumulate" must be one of in_place, autograd'),
    *(("gradient_pool", value, '"gradient_pool" must be bytes') for value in (True, 0, -1, "much")),
    ("tuner", "profile", "must be an object with keys of mode, machine"),
    ("tuner", {"modus": "model"}, "has no key 'modus': known are mode, machine, calibrate, cache, decisions, pinned"),
    ("tuner", {"mode": "fast"}, "must be one of adaptive, profile, model"),
    ("tuner", {"machine": 3}, "tuner.machine"),
    ("tuner", {"calibrate": -1}, "tuner.calibrate"),
    ("tuner", {"calibrate": True, "machine": "m.json"}, "remove one of them"),
    ("tuner", {"decisions": "auto"}, "write true for a file"),
    ("tuner", {"decisions": 3}, "tuner.decisions"),
    ("tuner", {"pinned": True}, "tuner.pinned"),
    ("tuner", {"decisions": True, "pinned": "p.json"}, "remove one of them"),
    ("tuner", {"mode": "model"}, "needs a machine to predict with"),
    ("pipeline", True, 'must be an object such as {"enabled": true}'),
    ("pipeline", {"policies": "1f1b"}, f"'policies': known are {', '.join(options.TABLE['pipeline'].parts)}"),
    ("pipeline", {"policy": "1f1b_hints"}, 'did you mean "1f1b_hint"'),
    ("pipeline", {"policy": "deepspeed"}, f"must be one of {', '.join(options.PIPELINE_POLICIES)}"),
    ("pipeline", {"policy": "looped"}, "several stages on a rank, but DeepSpeed's PipelineModule has one stage there"),
    ("pipeline", {"policy": "v"}, '"v" needs several stages on a rank'),
    ("pipeline", {"separate_wgrad": 1}, '"pipeline.separate_wgrad" must be true or false'),
    ("pipeline", {"policy": "zero_bubble", "separate_wgrad": False}, "policy zero_bubble needs it"),
    ("pipeline", {"in_flight": 0}, '"pipeline.in_flight" must be a whole number above 0'),
    ("pipeline", {"enabled": "yes"}, '"pipeline.enabled" must be true or false'),
    ("pipeline", {"plan": 3}, '"pipeline.plan" must be a path'),
    ("pipeline", {"plan": "auto"}, '"pipeline.plan": the word "auto" is not used here'),
    ("pipeline", {"memory_budget": "2GiB"}, '"pipeline.memory_budget" bounds a plan: also set "plan"'),
    ("pipeline", {"plan": "adaptive", "offload": "/x"}, '"pipeline.offload" is only for a plan from a file'),
    ("pipeline", {"plan": "p.json", "offload": ""}, '"pipeline.offload" must be a path'),
    ("pipeline", {"plan": "p.json", "memory_budget": 0}, '"pipeline.memory_budget" must be bytes'),
    ("placement", True, 'must be "adaptive", "fixed", or an object'),
    ("placement", {"every": 3}, "has no key 'every': known are interval, target, least_gain, horizon"),
    ("placement", {"interval": 0}, '"placement.interval" must be a whole number above 0'),
    ("placement", {"target": 0.9}, '"placement.target" must be a number from 1 to'),
    ("placement", {"least_gain": float("nan")}, '"placement.least_gain" must be a number from 0 to'),
    ("policy", "S5", 'did you mean "S'),
    ("policy", {"input": "recompute"}, '"policy.input" must be one of keep, offload, redispatch'),
    ("policy", {"output": "keep"}, "has no key 'output': known are input, pre_activation"),
    ("policy", 3, "one of none, S1, S2, S3, S4, or"),
]
# Policies by chunk, and the number of chunks next to them.
FEW = ' names 2 chunks, and "chunks" is '
WRONG_BY_CHUNK: list[tuple[Any, dict[str, Any], str]] = [
    (None, {"input": ["keep", "offload"]}, f'"policy.input"{FEW}adaptive: also write "chunks": 2'),
    ("adaptive", {"pre_activation": ["keep", "recompute"]}, f'"policy.pre_activation"{FEW}adaptive'),
    (3, {"input": ["keep", "offload"]}, f'"policy.input"{FEW}3: give 3'),
    (2, {"input": ["keep", "recompute"]}, '"policy.input[1]" must be one of keep, offload, redispatch'),
    (2, {"pre_activation": []}, '"policy.pre_activation" is an empty list'),
    (2, {"pre_activation": ["keep", None]}, '"policy.pre_activation[1]" must be one of'),
]


@pytest.mark.parametrize(
    "section, text",
    [
        ([], ""),
        ("on", ""),
        *(({key: value}, text) for key, value, text in WRONG),
        *(({"chunks": chunks, "policy": policy}, text) for chunks, policy, text in WRONG_BY_CHUNK),
    ],
    ids=str,
)
def test_Section_WrongValue_IsNamed(section: Any, text: str) -> None:
    with pytest.raises(config.ConfigError, match='"sluice"') as error:
        config.parse(section)
    assert text in str(error.value)


@pytest.mark.parametrize(
    "section, word, on, required",
    [
        (None, "", False, False),
        ({"enabled": True}, "", True, False),
        ({"enabled": True}, "0", False, False),
        ({"wrong": 1}, "0", False, False),
        (None, "1", True, False),
        ({"enabled": False}, "1", True, False),
        (None, "require", True, True),
        ({"enabled": True, "on_unsupported": "warn"}, "Require", True, True),
    ],
)
def test_Resolve_SectionAndEnvironment_Decide(section: Any, word: str, on: bool, required: bool) -> None:
    options = config.resolve(section, {"SLUICE": word})
    assert (options is not None) == on
    if options is not None:
        assert options.required == required
        assert not required or options.on_unsupported == "error"


def test_Resolve_UnknownWord_IsAnError() -> None:
    with pytest.raises(config.ConfigError, match="write 0, 1 or require"):
        config.resolve(None, {"SLUICE": "yes"})


@pytest.mark.parametrize("keys, found", [(["slucie", "fp16"], "slucie"), (["Sluices"], "Sluices"), (["sluice"], None)])
def test_SectionName_Misspelt_IsFound(keys: list[str], found: str | None) -> None:
    assert config.misspelt_section(keys) == found


def test_SectionName_HostsOwnKeys_AreNotTakenForIt() -> None:
    own = ["train_batch_size", "zero_optimization", "slurm", "suite", "expert_parallel", "slice_parallel"]
    assert config.misspelt_section(own) is None


@pytest.mark.parametrize(
    "line, expected",
    [
        ("train.py --lr 1", ("train.py", False, ["--lr", "1"], False)),
        ("--local_rank=1 train.py --lr 1", ("train.py", False, ["--local_rank=1", "--lr", "1"], False)),
        ("--local-rank 1 train.py", ("train.py", False, ["--local-rank", "1"], False)),
        ("--require -m pkg.train -x", ("pkg.train", True, ["-x"], True)),
    ],
)
def test_RunCommandLine_Launchers_AreUnderstood(line: str, expected: Any) -> None:
    assert run.split(line.split()) == expected


@pytest.mark.parametrize("line", ["", "--local_rank", "--fast train.py", "--local_rank=0"])
def test_RunCommandLine_Wrong_IsSaid(line: str) -> None:
    with pytest.raises(ValueError):
        run.split(line.split())


def test_Trace_Events_BecomeLanesInMicroseconds() -> None:
    place = {"layer": 1, "chunk": 2, "lane": "compute", "op": "gemm1", "direction": "backward"}
    made = trace.chrome([{**place, "begin_ns": 3000, "end_ns": 5000, "bytes": 0}], rank=3)["traceEvents"]
    assert {item["args"]["name"] for item in made if item["name"] == "thread_name"} == set(trace.LANES.values())
    last = made[-1]
    assert (last["pid"], last["ts"], last["dur"], last["name"], last["cat"]) == (3, 3.0, 2.0, "gemm1 2", "backward")
