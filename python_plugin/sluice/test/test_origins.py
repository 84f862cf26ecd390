# SPDX-License-Identifier: Apache-2.0
"""Tests the origins of options: the table is complete, and no form of a model's own config gets past it."""

from __future__ import annotations

import collections
import dataclasses
import json
import re
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import sluice
from sluice import config, options, settings
from sluice.adapters.deepspeed import hook
from sluice.errors import InvalidArgument
from sluice.planning import model as planning

FOR_MODELS = set(
    "enabled chunks wgrad_mode chunking grouping policy policy.input policy.pre_activation reuse memory_budget "
    "host_memory_budget max_outstanding deduplicate accumulate gradient_pool on_unsupported ranks_per_node "
    "tuner.mode".split()
)
REFUSED = {
    "gemm": {"gemm": "native"},
    "gemm_library": {"gemm_library": "/tmp/x.so"},
    "transport": {"transport": "c10d"},
    "wire_dtype": {"wire_dtype": "bf16"},
    "timeout": {"timeout": 1e9},
    "optimizer": {"optimizer": True},
    "clip_norm": {"clip_norm": "true"},
    "pipeline.enabled": {"pipeline": {"enabled": True}},
    "pipeline.policy": {"pipeline": {"policy": "1f1b"}},
    "pipeline.in_flight": {"pipeline": {"in_flight": 4}},
    "pipeline.separate_wgrad": {"pipeline": {"separate_wgrad": True}},
    "placement": {"placement": "adaptive"},
    "placement.interval": {"placement": {"interval": 5}},
    "placement.target": {"placement": {"target": 1.1}},
    "placement.least_gain": {"placement": {"least_gain": 0.1}},
    "placement.horizon": {"placement": {"horizon": 50}},
    "placement.bytes_per_second": {"placement": {"bytes_per_second": "50MB"}},
    "pipeline.plan": {"pipeline": {"plan": "p.json"}},
    "pipeline.memory_budget": {"pipeline": {"memory_budget": "2GiB"}},
    "pipeline.offload": {"pipeline": {"offload": "/tmp"}},
    "tuner.machine": {"tuner": {"machine": "m.json"}},
    "tuner.calibrate": {"tuner": {"calibrate": True}},
    "tuner.cache": {"tuner": {"cache": "/tmp/c"}},
    "tuner.decisions": {"tuner": {"decisions": True}},
    "tuner.pinned": {"tuner": {"pinned": "p.json"}},
}
OF_AN_ENGINE = {
    *("optimizer", "pipeline", "pipeline.enabled", "pipeline.policy", "pipeline.in_flight", "pipeline.plan"),
    *("pipeline.memory_budget", "pipeline.offload", "pipeline.separate_wgrad"),
    *("placement", "placement.interval", "placement.target", "placement.least_gain", "placement.horizon"),
    *("placement.bytes_per_second", "clip_norm"),
}


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    sluice.configure()


# ---- the table ----


def test_Table_EveryKeyOfTheSection_HasARule() -> None:
    assert all(row.why and row.may_come_from <= options.ANYONE for row in options.PATHS.values())


@pytest.mark.parametrize("key", [key for key, row in options.TABLE.items() if not row.parts])
def test_Table_KeysThatTakeObjects_AreNamedWithTheirParts(key: str) -> None:
    """An object under any other key would have keys without a rule."""
    with pytest.raises(config.ConfigError):
        config.parse({key: {}})


def test_Table_WhatAModelMaySay_GrowsOnlyHere() -> None:
    """FOR_MODELS is an allow-list: keys that load code, open files, use the network or wait must not be in it."""
    assert {path for path, rule in options.PATHS.items() if options.MODEL in rule.may_come_from} == FOR_MODELS
    # A host refuses unsupported keys: only an engine of DeepSpeed has stages, and transformers' origins have no
    # optimizer.
    narrow = {path for path, rule in options.PATHS.items() if not rule.may_come_from >= options.USER}
    assert narrow == OF_AN_ENGINE
    for path in narrow:
        hosts = {options.DS_CONFIG, options.SPEC} if path == "optimizer" else {options.DS_CONFIG}
        assert options.PATHS[path].may_come_from == hosts, path
    assert {*FOR_MODELS, *REFUSED, "tuner", "pipeline"} == set(options.PATHS)  # so that every rule is tried below


# ---- a model's own config ----


@pytest.mark.parametrize("path", REFUSED)
def test_Model_KeyOfTheUser_IsRefusedByName(path: str) -> None:
    with pytest.raises(config.ConfigError) as caught:
        settings.effective({"chunks": 2, **REFUSED[path]}, {})
    key, _, name = path.partition(".")
    call = f'sluice.configure({key}={{"{name}": ...}})' if name else f"sluice.configure({key}=...)"
    said = str(caught.value)
    for words in (f'"{path}"', options.PATHS[path].why, "the model's own config", call, "SLUICE_OPTIONS", "ds_config"):
        assert words in said, said
    assert '"chunks"' not in said


def test_Model_SeveralKeysOfTheUser_AreAllNamed() -> None:
    with pytest.raises(config.ConfigError) as caught:
        settings.effective({"gemm": "blas", "gemm_library": "x", "tuner": {"mode": "profile", "cache": "c"}}, {})
    for name in ("gemm", "gemm_library", "tuner.cache"):
        assert f'"{name}"' in str(caught.value)
    assert "tuner.mode" not in str(caught.value)


def test_Model_ItsOwnKeys_AreTaken() -> None:
    section = {
        **{"enabled": True, "chunks": 2, "wgrad_mode": "per_chunk", "chunking": "tokens", "memory_budget": "1GiB"},
        **{"policy": {"input": "redispatch", "pre_activation": ["keep", "recompute"]}, "host_memory_budget": 1 << 20},
        **{"max_outstanding": 3, "deduplicate": True, "accumulate": "autograd", "on_unsupported": "warn"},
        "grouping": "on",
        "gradient_pool": "1GiB",
        "ranks_per_node": 2,
        "reuse": False,
        "tuner": {"mode": "profile"},
    }
    assert {key for key in section if key != "tuner"} == {key for key in FOR_MODELS if "." not in key}
    assert settings.effective(section, {}) == config.parse(section)[1]


class Twofold(Mapping):
    """A mapping with one section in the first iteration, and another afterwards."""

    def __init__(self, first: dict[str, Any], later: dict[str, Any]) -> None:
        self.sections = [first, later]

    def __getitem__(self, key: str) -> Any:
        return self.sections[0][key]

    def __iter__(self) -> Iterator[str]:
        yield from tuple(self.sections[0])

    def __len__(self) -> int:
        return len(self.sections[0])

    def items(self) -> Any:
        return self.sections.pop(0).items() if len(self.sections) > 1 else self.sections[0].items()


class Quiet(dict):
    """A dict that hides a key in iterations, but returns it in lookups."""

    def items(self) -> Any:
        return {"chunks": 2}.items()

    def __iter__(self) -> Iterator[str]:
        return iter(("chunks",))

    def keys(self) -> Any:
        return {"chunks": 2}.keys()


class Sub(dict):
    pass


FILE = {"decisions": "train.py"}
CODE = {"gemm": "blas", "gemm_library": "/tmp/x.so"}
ODD = {
    "of capitals": {"GEMM_LIBRARY": "x"},
    "with a capital": {"Gemm": "blas"},
    "with a space": {"gemm_library ": "x"},
    "with a dash": {"gemm-library": "x"},
    "with a dot": {"tuner.decisions": "x"},
    "of bytes": {b"gemm_library": "x"},
    "of no key": {"gemmlibrary": "x"},
    "inside itself": {"sluice": CODE},
    "of the engine's own": {"required": True},
    "of a share": {"shared_memory_budget": 1},
    "a subclass": Sub(CODE),
    "ordered": collections.OrderedDict(CODE),
    "a proxy": types.MappingProxyType(CODE),
    "a chain": collections.ChainMap({"chunks": 2}, CODE),
    "null": {"gemm_library": None},
    "JSON": json.dumps(CODE),
    "pairs": list(CODE.items()),
    "a path": "/tmp/sluice.json",
    "tuner of capitals": {"tuner": {"Decisions": "x"}},
    "tuner a subclass": {"tuner": Sub(FILE)},
    "tuner a proxy": {"tuner": types.MappingProxyType(FILE)},
    "tuner JSON": {"tuner": json.dumps(FILE)},
    "tuner pairs": {"tuner": list(FILE.items())},
    "tuner in itself": {"tuner": {"tuner": FILE}},
    "tuner's key above": FILE,
    "under policy": {"policy": CODE},
    "under chunks": {"chunks": CODE},
    "under policy.input": {"policy": {"input": CODE}},
}


@pytest.mark.parametrize("form", ODD)
@pytest.mark.parametrize("over", [{}, {"gemm": "native", "tuner": {"mode": "adaptive"}}], ids=["alone", "under ours"])
def test_Model_OddForms_DoNotGetThrough(form: str, over: dict[str, Any]) -> None:
    """This also holds if the user has set the same key."""
    sluice.configure(**over)
    with pytest.raises(config.ConfigError):
        settings.effective(ODD[form], {})


@pytest.mark.parametrize("section", [Twofold({"chunks": 2}, CODE), Quiet(CODE)], ids=["twofold", "quiet"])
def test_Model_SectionThatShowsOthersLater_CountsAsFirstSeen(section: Any) -> None:
    found = settings.effective(section, {})
    assert found == config.Options(chunks=2)


def test_Model_SluiceSwitchedOff_IsNotRead() -> None:
    """A user can run a third party's model in this way without changing it."""
    assert settings.effective(CODE, {"SLUICE": "0"}) is None
    with pytest.raises(config.ConfigError):
        settings.effective({**CODE, "enabled": False}, {})


# ---- the others ----


def test_Precedence_EnvironmentThenConfigureThenModel() -> None:
    model = {"chunks": 2, "wgrad_mode": "per_chunk", "deduplicate": True, "tuner": {"mode": "profile"}}
    sluice.configure(chunks=3, wgrad_mode="deferred", tuner={"decisions": "kept.json"})
    found = settings.effective(model, {"SLUICE_OPTIONS": '{"chunks": 4}'})
    assert (found.chunks, found.wgrad_mode, found.deduplicate) == (4, "deferred", True)
    assert found.tuner == config.TunerOptions(decisions="kept.json")  # an object is one value
    sluice.configure(chunks=None)
    assert settings.effective(model, {}).chunks is None  # the user leaves it to Sluice
    sluice.configure(enabled=False)
    assert settings.effective({"enabled": True}, {}) is None
    sluice.configure(enabled=True)
    assert settings.effective({"enabled": False}, {}) is not None


@pytest.mark.parametrize("path", [path for path in REFUSED if path not in OF_AN_ENGINE])
def test_User_EveryKey_IsTaken(path: str) -> None:
    section = {"gemm": "blas", **REFUSED[path]}
    wanted = config.parse(section)[1]
    assert settings.of_ds_config({"enabled": True, **section}, {}) == wanted
    assert settings.effective(None, {"SLUICE_OPTIONS": json.dumps(section)}) == wanted
    assert settings.effective(section, {}, options.SPEC) == wanted
    sluice.configure(**section)
    assert settings.effective(None, {}) == wanted


@pytest.mark.parametrize("path", [path for path in REFUSED if path in OF_AN_ENGINE])
def test_KeyOfAnEngine_OfAHostThatHasNone_IsRefusedNotIgnored(path: str) -> None:
    section = REFUSED[path]
    whole = section
    if path in ("pipeline.memory_budget", "pipeline.offload"):  # they go with another key
        whole = {"pipeline": {"plan": "p.json", **section["pipeline"]}}
    assert getattr(settings.of_ds_config({"enabled": True, **whole}, {}), path.partition(".")[0])
    with pytest.raises(config.ConfigError, match=f'"{path}" may come from ds_config'):
        settings.effective(None, {"SLUICE_OPTIONS": json.dumps(section)})
    with pytest.raises(config.ConfigError, match=f'"{path}" may come from ds_config'):
        sluice.configure(**section)
    if path == "optimizer":  # Megatron's, where it is offloaded
        assert settings.effective(section, {}, options.SPEC).optimizer
        return
    with pytest.raises(config.ConfigError, match=f'"{path}" .* cannot come from the layer\'s spec'):
        settings.effective(section, {}, options.SPEC)


def test_Environment_NamesAFile_ItsObjectCounts(tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    path.write_text('{"gemm": "native", "chunks": 4}')
    path.chmod(0o600)
    found = settings.effective({"chunks": 2, "wgrad_mode": "deferred"}, {"SLUICE_OPTIONS": str(path)}, options.SPEC)
    assert (found.gemm, found.chunks, found.wgrad_mode) == ("native", 4, "deferred")


@pytest.mark.parametrize(
    "text, words",
    [
        (None, "is neither: No such file"),
        ('{"chunks": 4', "must hold a JSON object such as"),
        ("[4]", "must hold a JSON object such as"),
        ('{"optimizer": true}', "cannot come from SLUICE_OPTIONS"),
        ('{"chnks": 4}', 'did you mean "chunks"'),
    ],
)
def test_Environment_FileThatIsNoSection_IsRefusedByName(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "options.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(config.ConfigError, match=re.escape(words)):
        settings.effective(None, {"SLUICE_OPTIONS": str(path)})


def _by_hook(section: dict[str, Any], folder: Path) -> None:
    hook.apply(types.SimpleNamespace(_config=types.SimpleNamespace(_param_dict={"sluice": section})))


def _by_file(section: dict[str, Any], folder: Path, **more: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**more, "sluice": section}))
    planning.read_config(str(folder / "config.json"))


def _by_model_file(section: dict[str, Any], folder: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_local_experts": 8}
    _by_file(section, folder, model_type="mixtral", num_experts_per_tok=2, **sizes)


DOORS: dict[str, Callable[[dict[str, Any], Path], Any]] = {
    "sluice.configure": lambda section, folder: sluice.configure(**section),
    "SLUICE_OPTIONS": lambda section, folder: settings.effective(None, {"SLUICE_OPTIONS": json.dumps(section)}),
    "the model's own config": lambda section, folder: settings.effective(section, {}),
    "the layer's spec": lambda section, folder: settings.effective(section, {}, options.SPEC),
    "ds_config": _by_hook,
    "ds_config ": _by_file,
    "the model's own config ": _by_model_file,
}


@pytest.mark.parametrize("door", DOORS)
def test_Doors_EachAsksTheTable(door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = dataclasses.replace(options.PATHS["chunks"], may_come_from=frozenset(), why="it is tried here")
    monkeypatch.setitem(options.PATHS, "chunks", row)
    with pytest.raises(InvalidArgument) as caught:
        DOORS[door]({"chunks": 2}, tmp_path)
    assert f'"chunks" (it is tried here) cannot come from {door.strip()}' in str(caught.value)
