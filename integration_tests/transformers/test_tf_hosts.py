# SPDX-License-Identifier: Apache-2.0
"""Tests common uses of a model around its experts: adapters, copies, generation, loading."""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sluice
import tf_compare
import tf_families
import tf_models
import torch
from sluice.errors import InvalidArgument, InvalidState
from tf_compare import check, rows
from tf_models import experts_of, runs_on_sluice
from torch.nn.utils import parametrize, prune
from transformers import AutoConfig, AutoModelForCausalLM

CLASS_OF = dict(tf_families.classes())


# ---- low-rank adapters, as PEFT puts them on stacked experts ----


class LowRank(torch.nn.Module):
    """Adds the product of two small tensors to a frozen one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.randn(*tensor.shape[:-2], 2, tensor.shape[-1]) * 0.1)
        self.b = torch.nn.Parameter(torch.randn(*tensor.shape[:-1], 2) * 0.1)

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + self.b @ self.a


@pytest.mark.parametrize("adapted", [["gate_up_proj", "down_proj"], ["down_proj"]], ids=str)
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "muse_spark"])
def test_LowRank_OnFrozenExperts_AsEager(kind: str, adapted: list[str]) -> None:
    module = tf_families.make(kind, CLASS_OF[kind], 37, 29, 6)
    given = rows(37, 6, 23, 2)
    check(module, given)  # Sluice's cached state is then stale
    module.requires_grad_(False)
    for name in adapted:
        parametrize.register_parametrization(module, name, LowRank(getattr(module, name)))
    check(module, given)
    trained = {name for name, parameter in module.named_parameters() if parameter.grad is not None}
    assert trained == {f"parametrizations.{name}.0.{which}" for name in adapted for which in "ab"}
    with torch.no_grad():
        found = module(given.tokens, given.ids, given.weights)
    wanted = tf_compare.reference(module, given, torch.float32).values["output"]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"policy": "S4"}, {"reuse": True}], ids=str)
@pytest.mark.parametrize("is_known", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "muse_spark"])
def test_Pruned_Experts_AsEager(kind: str, is_known: bool, options: dict[str, Any]) -> None:
    """Pruning computes the stacked tensor from another parameter of the module."""
    module = tf_families.make(kind, CLASS_OF[kind], 37, 29, 6)
    given = rows(37, 6, 23, 2)
    sluice.configure(**options)
    try:
        if is_known:
            check(module, given)
        prune.random_unstructured(module, "down_proj", amount=0.4)
        found = tf_compare.run(module, given, torch.float32)
    finally:
        sluice.configure()
    with tf_compare.implementation(module, "eager"):
        gaps = found.gaps(tf_compare.run(module, given, torch.float32))
    assert "down_proj_orig" in gaps and max(gaps.values()) < 2e-5, gaps


def test_Experts_AllFrozenInAModel_OthersTrainAsEager() -> None:
    def step(implementation: str) -> dict[str, torch.Tensor]:
        model = tf_models.make("mixtral", implementation)
        for module in experts_of(model):
            module.requires_grad_(False)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        found = tf_models.step(model, tf_models.batch())
        assert implementation != "sluice" or runs_on_sluice(model)
        assert all(parameter.grad is None for module in experts_of(model) for parameter in module.parameters())
        return found

    gaps = tf_models.gaps(step("sluice"), step("eager"))
    assert max(gaps.values()) < 1e-4, gaps


# ---- copies ----


@pytest.mark.usefixtures("one_gemm")
def test_Copies_AndPickles_ComputeWithTheirOwnParameters() -> None:
    model, ids = tf_models.make("mixtral").eval(), tf_models.batch()
    with torch.no_grad():
        wanted = model(ids).logits
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(ids).logits, wanted) and runs_on_sluice(twin)
            for module in experts_of(twin):
                module.down_proj.mul_(2)
            assert not torch.allclose(twin(ids).logits, wanted)
            assert torch.equal(model(ids).logits, wanted)


def test_Module_SharedByTwoLayers_AsEager() -> None:
    def step(implementation: str) -> dict[str, torch.Tensor]:
        model = tf_models.make("mixtral", implementation)
        model.model.layers[1].mlp.experts = model.model.layers[0].mlp.experts
        return tf_models.step(model, tf_models.batch())

    gaps = tf_models.gaps(step("sluice"), step("eager"))
    assert max(gaps.values()) < 1e-4, gaps


# ---- generation ----

WAYS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3, "do_sample": False},
    "static cache": {"cache_implementation": "static", "do_sample": False},
    "samples": {"do_sample": True, "temperature": 0.8, "num_return_sequences": 2},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_Generation_OfPaddedPrompts_SameTokensAsEager(kind: str, way: str) -> None:
    prompt = tf_models.batch(rows=3, length=7)
    mask = torch.ones_like(prompt)
    for row, pad in enumerate((0, 3, 5)):
        prompt[row, :pad], mask[row, :pad] = 0, 0
    found = []
    for implementation in ("sluice", "eager"):
        model = tf_models.make(kind, implementation).eval()
        torch.manual_seed(1)
        found.append(model.generate(prompt, attention_mask=mask, max_new_tokens=9, **WAYS[way]))
        assert implementation != "sluice" or runs_on_sluice(model)
    assert torch.equal(*found)


# ---- loading ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("by", ["argument", "config", "device map"])
def test_Pretrained_EachWayToName_RunsInTheSavedDtype(tmp_path: Path, by: str, dtype: torch.dtype) -> None:
    everywhere = {"num_experts_per_tok": 4}  # all 4 experts, so that rounding changes weights but no route
    stock = tf_models.make("mixtral", "eager", dtype, **everywhere).eval()
    stock.save_pretrained(tmp_path)
    how: dict[str, Any] = {"experts_implementation": "sluice", "dtype": "auto"}
    if by == "config":
        how = {"config": AutoConfig.from_pretrained(tmp_path, experts_implementation="sluice"), "dtype": "auto"}
    if by == "device map":
        how["device_map"] = "cpu"
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", **how).eval()
    ids = tf_models.batch()
    with torch.no_grad():
        found, wanted = model(ids).logits, stock(ids).logits
    assert found.dtype == dtype and runs_on_sluice(model)
    assert float((found - wanted).abs().max() / wanted.abs().max()) < (1e-5 if dtype == torch.float32 else 5e-2)


# ---- torch.compile ----


def test_Compile_OfTheWholeModel_LossAndGradientsAsWithout() -> None:
    code = """
import torch, tf_models, sluice
ids = tf_models.batch()
wanted = tf_models.step(tf_models.make("mixtral"), ids)
model = tf_models.make("mixtral")
compiled = torch.compile(model, backend="aot_eager")
compiled.train()
out = compiled(input_ids=ids, labels=ids)
out.loss.backward()
found = {"loss": out.loss.detach(), "logits": out.logits.detach()}
found |= {name: p.grad for name, p in model.named_parameters()}
gaps = tf_models.gaps(found, wanted)
assert max(gaps.values()) < 1e-5, gaps
(total,) = sluice.stats(model.model.layers[0].mlp.experts)["contexts"]
assert total["num_passes"] == 2 * 2 * 2  # layers, directions, models
with torch.no_grad():
    model.eval(), compiled.eval()
    torch.testing.assert_close(compiled(input_ids=ids).logits, model(input_ids=ids).logits)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    environment.pop("TORCHDYNAMO_DISABLE", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=290, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


# ---- stats ----


def test_Stats_OfAWholeModel_AreThoseOfItsExperts() -> None:
    model = tf_models.make("mixtral")
    experts = tf_models.experts_of(model)
    assert sluice.stats(model)["layers"] == [] == sluice.decisions(model)  # the first call makes them
    with pytest.raises(InvalidState, match="MixtralExperts has not run yet: call the model once first"):
        sluice.stats(experts[0])
    with pytest.raises(InvalidState, match="no layer of this MixtralForCausalLM yet"):
        sluice.export_machine(model, "never.json")
    model(tf_models.batch())
    told = [sluice.stats(module) for module in experts]
    layers = [layer for each in told for layer in each["layers"]]
    assert [each["computed_by"] for each in layers] == ["sluice"] * 2 and layers[0] != layers[1]
    assert sluice.stats(model) == sluice.stats(experts) == sluice.stats([model, *experts])
    assert sluice.stats(model) == {**told[0], "layers": layers}  # the totals of their one context are listed once


def test_Stats_OfTheHostsOwnImplementation_SaysWhichItIs() -> None:
    model = tf_models.make("mixtral")
    model.set_experts_implementation("grouped_mm")
    with pytest.raises(InvalidArgument, match="MixtralForCausalLM does not run .* 2 experts .*grouped_mm"):
        sluice.stats(model)
    with pytest.raises(InvalidArgument, match="MixtralExperts does not run on Sluice: it holds 1 experts module of"):
        sluice.trace.stop(of=tf_models.experts_of(model))


def test_Stats_OfWhatIsWrapped_AreThoseOfWhatIsInIt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # otherwise torch.compile returns its input
    model = tf_models.make("mixtral")
    model(tf_models.batch())
    experts = tf_models.experts_of(model)[0]
    assert sluice.stats(torch.compile(model)) == sluice.stats(model)
    assert sluice.stats(torch.compile(experts)) == sluice.stats(experts)
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        assert sluice.stats(parallel) == sluice.stats(model)
        assert sluice.decisions(parallel) == sluice.decisions(model)
    finally:
        torch.distributed.destroy_process_group()


def test_TraceStop_OfOneLayer_HasItsEventsAlone() -> None:
    model = tf_models.make("mixtral")
    model(tf_models.batch())
    experts = tf_models.experts_of(model)[1]
    sluice.trace.start()
    model(tf_models.batch())
    events = sluice.trace.stop(of=experts)
    assert {event["layer"] for event in events} == {sluice.stats(experts)["layers"][0]["layer_id"]}
    assert sluice.trace.stop() == []
