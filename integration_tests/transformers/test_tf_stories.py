# SPDX-License-Identifier: Apache-2.0
"""Tests uses of several features of transformers at once."""

from pathlib import Path
from typing import Any

import pytest
import sluice
import tf_models
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

STEPS = 6


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


def _train(implementation: str, folder: Path, bf16: bool) -> tuple[Any, list[float], list[float], Any]:
    model = tf_models.make("qwen3_moe", implementation)
    data = [{"input_ids": row, "labels": row} for seed in range(16) for row in tf_models.batch(seed, rows=4)]
    arguments = TrainingArguments(
        output_dir=str(folder / implementation),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        seed=0,
        bf16=bf16,
        disable_tqdm=True,
    )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    writes = Writes()
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:8], callbacks=[writes])
    trainer.train()
    history = trainer.state.log_history
    losses = [float(entry["loss"]) for entry in history if "loss" in entry]
    return model, losses, [float(entry["eval_loss"]) for entry in history if "eval_loss" in entry], writes.texts


@pytest.mark.parametrize("bf16", [False, True], ids=["f32", "bf16 autocast"])
def test_Trainer_CheckpointingAccumulationEvalGenerateSave_AsEager(tmp_path: Path, bf16: bool) -> None:
    _, wanted, evaluated, texts = _train("eager", tmp_path, bf16)
    model, found, mine, written = _train("sluice", tmp_path, bf16)
    # Six steps in f32; under autocast both round to bf16 at the same places, with one sum in another order.
    near = 5e-3 if bf16 else 1e-5
    assert len(found) == STEPS and found == pytest.approx(wanted, rel=near)
    assert len(mine) == 2 and mine == pytest.approx(evaluated, rel=near)
    assert len(written) == 2 and (bf16 or written == texts)
    experts = model.model.layers[-1].mlp.experts
    assert (
        sluice.stats(experts)["layers"][0]["computed_by"] == "sluice"
        and sluice.stats(experts)["contexts"][0]["num_passes"] > STEPS
    )
    model.save_pretrained(tmp_path / "saved")
    assert "sluice" not in (tmp_path / "saved" / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", experts_implementation="eager").eval()
    trained = model.state_dict()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in again.state_dict().items())
    if not bf16:  # accelerate leaves autocast around the trained model's forward
        ids = tf_models.batch(5)
        with torch.no_grad():
            gap = (again(input_ids=ids).logits - model.eval()(input_ids=ids).logits).abs().max()
        assert float(gap) < 1e-5
