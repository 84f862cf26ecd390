# SPDX-License-Identifier: Apache-2.0
"""Compares loss, logits and all gradients of tiny models with those of transformers' eager experts."""

from typing import Any

import pytest
import tf_models
import torch
from tf_models import runs_on_sluice


@pytest.mark.parametrize("kind", tf_models.KINDS)
def test_Model_LossAndEveryGradient_AsEagerInF64(kind: str) -> None:
    model = tf_models.make(kind)
    found = tf_models.step(model, tf_models.batch())
    assert runs_on_sluice(model)
    wanted = tf_models.step(tf_models.make(kind, "eager", torch.float64), tf_models.batch())
    gaps = tf_models.gaps(found, wanted)
    name = max(gaps, key=lambda key: gaps[key])
    assert gaps[name] < 1e-4, (name, gaps[name])


@pytest.mark.usefixtures("one_gemm")
@pytest.mark.parametrize("reentrant", [True, False])
def test_Model_GradientCheckpointing_SameBits(reentrant: bool) -> None:
    plain, checkpointed = tf_models.make("mixtral"), tf_models.make("mixtral")
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    wanted, found = (tf_models.step(model, tf_models.batch()) for model in (plain, checkpointed))
    for name, value in wanted.items():
        assert torch.equal(value, found[name]), name


def _curve(kind: str, implementation: str, steps: int) -> list[float]:
    model = tf_models.make(kind, implementation)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for number in range(steps):
        ids = tf_models.batch(number % 4)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _compare(kind: str) -> None:
    found, wanted = _curve(kind, "sluice", 100), _curve(kind, "eager", 100)
    assert wanted[-1] < 0.7 * wanted[0]
    # Two f32 runs diverge slowly, as rounding sometimes flips a route.
    assert max(abs(a - b) / b for a, b in zip(found[:20], wanted)) < 1e-4
    late = slice(-20, None)
    assert abs(sum(found[late]) - sum(wanted[late])) / sum(wanted[late]) < 0.03


def test_Training_HundredSteps_SameCurve() -> None:
    _compare("mixtral")


@pytest.mark.full
@pytest.mark.parametrize("kind", [kind for kind in tf_models.KINDS if kind != "mixtral"])
def test_Training_HundredStepsOfEveryModel_SameCurve(kind: str) -> None:
    _compare(kind)


def test_Generation_Greedy_SameTokensAsEager() -> None:
    prompt: Any = tf_models.batch(rows=2, length=5)
    found, wanted = (
        tf_models.make("mixtral", name).eval().generate(prompt, max_new_tokens=12, do_sample=False)
        for name in ("sluice", "eager")
    )
    assert torch.equal(found, wanted)


def test_SwitchAtRunTime_AndBack(capfd: pytest.CaptureFixture[str]) -> None:
    model, ids = tf_models.make("mixtral", "eager").eval(), tf_models.batch()
    with torch.no_grad():
        wanted = model(ids).logits
        model.set_experts_implementation("sluice")
        assert not runs_on_sluice(model)
        torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-4, atol=1e-5)
        assert runs_on_sluice(model)
        model.set_experts_implementation("eager")
        assert torch.equal(model(ids).logits, wanted)


def test_SaveAndLoad_UnchangedAndWithoutAWordOfSluice(tmp_path: Any) -> None:
    model = tf_models.make("qwen3_moe")
    tf_models.step(model, tf_models.batch())
    model.save_pretrained(tmp_path)
    assert "sluice" not in (tmp_path / "config.json").read_text()
    loaded = type(model).from_pretrained(tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name
