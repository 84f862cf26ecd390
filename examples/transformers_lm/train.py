# SPDX-License-Identifier: Apache-2.0
"""Trains a small Mixtral on real text with transformers' Trainer. One config value enables Sluice.

    .venv/bin/python examples/transformers_lm/train.py [--steps 200] [--experts sluice|grouped_mm|eager]

The text is Python's own manual (pydoc_data.topics), byte by byte; nothing is downloaded. With transformers' own experts
(grouped_mm, eager) the losses are the same.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import tempfile

import torch
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments


def text() -> torch.Tensor:
    """Every topic of Python's manual as bytes."""
    topics = pydoc_data.topics.topics
    return torch.frombuffer(bytearray("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)


def pieces(data: torch.Tensor, length: int) -> list[dict[str, torch.Tensor]]:
    """One training sample per `length` bytes."""
    rows = data[: len(data) // length * length].long().view(-1, length)
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--experts", default="sluice")
    options = parser.parse_args()

    config = MixtralConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        experts_implementation=options.experts,
    )
    torch.manual_seed(0)
    model = MixtralForCausalLM(config)
    with tempfile.TemporaryDirectory() as folder:  # the Trainer requires one, but nothing is saved
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=8,
            learning_rate=2e-3,
            lr_scheduler_type="constant",
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            seed=0,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=pieces(text(), 128))
        trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']:4d} loss {float(entry['loss']):.4f}")


if __name__ == "__main__":
    main()
