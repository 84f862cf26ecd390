# SPDX-License-Identifier: Apache-2.0
"""Tests what the package's functions find in a layer, a model, a wrapper, a list, and in anything else."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sluice
import torch
from sluice import layer_lookup
from sluice.adapters.torch import Context, gradient_pool
from sluice.errors import InvalidArgument


class _Context:
    def __init__(self, name: str) -> None:
        self.name, self.alive, self.recorded = name, True, [0, 1]
        self.ep_group = SimpleNamespace(ranks=(0, 1))
        self.current, self.peak = 4, 9

    def stats(self, reset_peak: bool = False) -> dict[str, Any]:
        found = {"of": self.name, "peak_bytes": self.peak}
        self.peak = self.current if reset_peak else self.peak
        return found

    def decisions(self) -> list[dict[str, Any]]:
        return [{"of": self.name}]

    def answers(self) -> list[dict[str, Any]]:
        return [{"layer": self.name, "rows": 1}]

    def machine_json(self) -> str:
        return json.dumps({"of": self.name})

    def trace_start(self, capacity: int) -> None:
        self.capacity = capacity

    def trace_take(self) -> list[dict[str, Any]]:
        return [{"of": self.name, "layer": layer, "begin_ns": layer} for layer in self.recorded]


class _Kept:
    """A mock of an adapter's object for a layer."""

    def __init__(self, layer_id: int, context: Any) -> None:
        self.layer_id, self.context = layer_id, context

    def stats(self) -> dict[str, Any]:
        return {"layer_id": self.layer_id}

    def contexts(self) -> list[_Context]:
        return [self.context]


def _layer(layer_id: int, context: Any) -> torch.nn.Module:
    module = torch.nn.Linear(1, 1)
    module._sluice = _Kept(layer_id, context)
    return module


ONE, TWO = _Context("one"), _Context("two")
LAYERS = [_layer(0, ONE), _layer(1, ONE), _layer(0, TWO)]
MODEL = torch.nn.Sequential(*LAYERS, torch.nn.Linear(1, 1))


def _told(*layers: tuple[int, int], of: tuple[str, ...]) -> dict[str, Any]:
    """Returns the expected `sluice.stats`, without `process`. layers: id and context's index; of: context names."""
    return {
        "layers": [{"layer_id": layer_id, "contexts": [place]} for layer_id, place in layers],
        "contexts": [{"ranks": [0, 1], "of": name, "peak_bytes": 9} for name in of],
    }


ALL = _told((0, 0), (1, 0), (0, 1), of=("one", "two"))
SECOND = _told((1, 0), of=("one",))


def _stats(given: Any, reset_peak: bool = False) -> dict[str, Any]:
    """Returns `sluice.stats` without the numbers of the process, which other tests change."""
    found = sluice.stats(given, reset_peak)
    assert list(found) == ["layers", "contexts", "process"]
    return {name: found[name] for name in ("layers", "contexts")}


class _Moe(torch.nn.Module):
    """A module whose layer has the name of that in DeepSpeed's MoE."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.deepspeed_moe = layer


@pytest.mark.parametrize(
    "what, told",
    [
        (MODEL, ALL),
        (tuple(LAYERS), ALL),
        ([MODEL, LAYERS[2]], ALL),
        (torch.nn.Sequential(_Moe(LAYERS[1])), SECOND),
        (LAYERS[1], SECOND),
        (_Moe(LAYERS[1]), SECOND),
        (torch.nn.DataParallel(LAYERS[1]), SECOND),
        ([LAYERS[1]], SECOND),
        ([], _told(of=())),
    ],
)
def test_Given_LayersModelsWrappersAndLists_AllFunctionsTakeThem(what: Any, told: Any, tmp_path) -> None:
    assert _stats(what) == told
    names = [each["of"] for each in told["contexts"]]
    assert sluice.decisions(what) == [{"of": name} for name in names]
    assert sluice.export_decisions(tmp_path / "decisions.json", of=what) == len(names)
    if names:
        assert sluice.export_machine(what, tmp_path / "machine.json") == {"of": names[0]}


def test_Stats_ResetPeak_IsReadOnceForEachContext() -> None:
    context = _Context("shared")
    model = torch.nn.Sequential(_layer(0, context), _layer(1, context))
    peaks = [_stats(model, reset_peak=True)["contexts"][0]["peak_bytes"] for _ in range(2)]
    assert peaks == [9, 4]


def test_Manual_HasEveryNumberOfStats() -> None:
    with contextlib.closing(Context()) as context:
        names = [*_layer(0, context)._sluice.stats(), "contexts", "ranks", *context.stats(), *gradient_pool.numbers()]
    manual = (Path(__file__).parents[3] / "docs/tools.md").read_text()
    chapter = manual.split("### The numbers of `sluice.stats`\n", 1)[1].split("\n## ", 1)[0]
    in_rows = "\n".join(line for line in chapter.split("\n") if line.startswith("| "))
    assert [name for name in names if f"`{name}`" not in in_rows] == []


def test_Given_CompiledModels_AreWhatIsInThem(monkeypatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # otherwise it returns its input
    compiled = torch.compile(_Moe(LAYERS[1]))
    assert type(compiled).__name__ == "OptimizedModule" and _stats(compiled) == SECOND
    assert _stats(torch.compile(MODEL)) == ALL
    with pytest.raises(InvalidArgument, match="OptimizedModule around Linear does not run on Sluice"):
        sluice.stats(torch.compile(torch.nn.Linear(1, 1)))


@pytest.mark.parametrize(
    "what, words",
    [
        (3, "int is not a layer, model or engine"),
        (None, "NoneType is not a layer, model or engine"),
        ({"layer": LAYERS[0]}, "dict is not a layer, model or engine"),
        ([LAYERS[0], "moe"], "str is not a layer, model or engine"),
        (torch.nn.Linear(1, 1), "Linear does not run on Sluice: it holds no MoE layer that Sluice knows"),
        (torch.nn.DataParallel(torch.nn.Linear(1, 1)), "DataParallel around Linear does not run on Sluice"),
    ],
)
def test_Given_AnythingElse_EachFunctionNamesIt(what: Any, words: str, tmp_path) -> None:
    path = tmp_path / "never.json"
    calls = [sluice.stats, sluice.decisions, lambda it: sluice.export_machine(it, path)]
    if what is not None:  # to these, None means everything that runs
        calls += [lambda it: sluice.export_decisions(path, of=it), lambda it: sluice.trace.stop(path, of=it)]
    for call in calls:
        with pytest.raises(InvalidArgument, match=words) as caught:
            call(what)
        assert isinstance(caught.value, ValueError)
    assert list(tmp_path.iterdir()) == []


def test_Given_ProblemsWhileLoading_AreSaid(monkeypatch) -> None:
    monkeypatch.setattr(layer_lookup.autoload, "problems", ["deepspeed.runtime.engine could not be prepared"])
    with pytest.raises(InvalidArgument, match="no MoE layer .*; deepspeed.runtime.engine could not be prepared"):
        sluice.stats(torch.nn.Linear(1, 1))


def test_TraceStop_OfOneLayer_ForgetsTheOthers(monkeypatch) -> None:
    monkeypatch.setattr(sluice.trace, "_contexts", {ONE, TWO})
    sluice.trace.start()
    with pytest.raises(InvalidArgument):
        sluice.trace.stop(of="a typing error")
    assert sluice.trace.recording()
    assert sluice.trace.stop(of=LAYERS[1]) == [{"of": "one", "layer": 1, "begin_ns": 1}]
    assert not sluice.trace.recording() and ONE.capacity == TWO.capacity == 0
