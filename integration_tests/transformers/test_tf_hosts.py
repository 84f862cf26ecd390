# SPDX-License-Identifier: Apache-2.0
"""Tests common uses of a model around its experts: training, copies, generation, loading."""

import copy
import pickle
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
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback

# ---- training ----


@pytest.mark.parametrize("kind", tf_models.KINDS)
def test_Model_LossAndEveryGradient_AsEagerInF64(kind: str) -> None:
    model = tf_models.make(kind)
    found = tf_models.step(model, tf_models.batch())
    assert runs_on_sluice(model)
    gaps = tf_compare.gaps(found, tf_models.step(tf_models.make(kind, "eager", torch.float64), tf_models.batch()))
    assert max(gaps.values()) < 1e-4, gaps


class Writes(TrainerCallback):
    """Generates in the middle of training, as users do to check progress."""

    def __init__(self) -> None:
        self.texts: list[list[list[int]]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step % 3 == 0:
            model.eval()
            with torch.no_grad():
                prompt = tf_models.batch(99, rows=2, length=5)
                self.texts.append(model.generate(prompt, max_new_tokens=6, do_sample=False).tolist())
            model.train()


def _trained(implementation: str, folder: Path, bf16: bool) -> tuple[Any, list[float], list[float], Any]:
    model = tf_models.make("qwen3_moe", implementation)
    data = [{"input_ids": row, "labels": row} for seed in range(16) for row in tf_models.batch(seed, rows=4)]
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 2e-3, "max_steps": 6}
    arguments = tf_models.arguments(folder, eval_strategy="steps", eval_steps=3, bf16=bf16, **sizes)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    writes = Writes()
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:8], callbacks=[writes])
    trainer.train()
    history = trainer.state.log_history
    losses, evaluated = ([entry[key] for entry in history if key in entry] for key in ("loss", "eval_loss"))
    return model, losses, evaluated, writes.texts


@pytest.mark.parametrize("bf16", [False, True], ids=["f32", "bf16 autocast"])
def test_Trainer_CheckpointingAccumulationEvalGenerateSave_AsEager(tmp_path: Path, bf16: bool) -> None:
    _, wanted, evaluated, texts = _trained("eager", tmp_path, bf16)
    model, found, mine, written = _trained("sluice", tmp_path, bf16)
    # Six steps in f32; under autocast both round to bf16 at the same places, with one sum in another order.
    near = 5e-3 if bf16 else 1e-5
    assert len(found) == 6 and found == pytest.approx(wanted, rel=near)
    assert len(mine) == 2 and mine == pytest.approx(evaluated, rel=near)
    assert len(written) == 2 and (bf16 or written == texts)
    assert runs_on_sluice(model)
    model.save_pretrained(tmp_path / "saved")
    assert "sluice" not in (tmp_path / "saved" / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", experts_implementation="eager").eval()
    trained = model.state_dict()
    assert trained.keys() == again.state_dict().keys()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in again.state_dict().items())
    if not bf16:  # accelerate leaves autocast around the trained model's forward
        ids = tf_models.batch(5)
        with torch.no_grad():
            gap = (again(input_ids=ids).logits - model.eval()(input_ids=ids).logits).abs().max()
        assert float(gap) < 1e-5


# ---- experts computed from other parameters ----


class LowRank(torch.nn.Module):
    """Adds the product of two small tensors to a frozen one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.randn(*tensor.shape[:-2], 2, tensor.shape[-1]) * 0.1)
        self.b = torch.nn.Parameter(torch.randn(*tensor.shape[:-1], 2) * 0.1)

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + self.b @ self.a


def low_rank(module: torch.nn.Module) -> None:
    module.requires_grad_(False)
    parametrize.register_parametrization(module, "down_proj", LowRank(module.down_proj))


COMPUTED: dict[str, tuple[Any, str]] = {
    "low rank": (low_rank, "parametrizations.down_proj.0.a"),
    "pruned": (lambda module: prune.random_unstructured(module, "down_proj", amount=0.4), "down_proj_orig"),
}


@pytest.mark.parametrize("options", [{}, {"policy": "S4"}, {"reuse": True}], ids=str)
@pytest.mark.parametrize("is_known", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "muse_spark"])
@pytest.mark.parametrize("how", COMPUTED)
def test_Computed_Experts_AsEager(how: str, kind: str, is_known: bool, options: dict[str, Any]) -> None:
    module = tf_families.make(kind, 37, 29, 6)
    given = rows(37, 6, 23, 2)
    change, trained = COMPUTED[how]
    sluice.configure(**options)
    if is_known:  # Sluice's cached state is then stale
        check(module, given)
    change(module)
    found = tf_compare.run(module, given, torch.float32)
    with torch.no_grad():
        again = module(given.tokens, given.ids, given.weights)
    torch.testing.assert_close(again, found["output"], rtol=1e-4, atol=1e-4)
    with tf_compare.implementation(module, "eager"):
        gaps = tf_compare.gaps(found, tf_compare.run(module, given, torch.float32))
    assert trained in gaps and max(gaps.values()) < 2e-5, gaps
    assert dict(module.named_parameters())[trained].grad.abs().max() > 0


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


def test_SwitchAtRunTime_AndBack() -> None:
    model, ids = tf_models.make("mixtral", "eager").eval(), tf_models.batch()
    with torch.no_grad():
        wanted = model(ids).logits
        model.set_experts_implementation("sluice")
        assert not runs_on_sluice(model)
        torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-4, atol=1e-5)
        assert runs_on_sluice(model)
        model.set_experts_implementation("eager")
        assert torch.equal(model(ids).logits, wanted)


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
    layers = [layer for module in experts for layer in sluice.stats(module)["layers"]]
    assert [each["computed_by"] for each in layers] == ["sluice"] * 2 and layers[0] != layers[1]
    assert sluice.stats(model)["layers"] == layers


def test_Stats_OfTheHostsOwnImplementation_SaysWhichItIs() -> None:
    model = tf_models.make("mixtral")
    model.set_experts_implementation("grouped_mm")
    with pytest.raises(InvalidArgument, match="MixtralForCausalLM does not run .* 2 experts .*grouped_mm"):
        sluice.stats(model)
    with pytest.raises(InvalidArgument, match="MixtralExperts does not run on Sluice: it holds 1 experts module of"):
        sluice.trace.stop(of=tf_models.experts_of(model))
