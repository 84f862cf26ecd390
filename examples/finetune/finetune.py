# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes an MoE model with LoRA on CPUs: Trainer, PEFT, and the experts on Sluice; trains, evaluates, generates,
saves the adapter, and merges it into a checkpoint.

    .venv/bin/python examples/finetune/finetune.py [--model FOLDER] [--out tuned] [--steps 40]
    .venv/bin/torchrun --nproc-per-node 2 examples/finetune/finetune.py [--adapt attention]

Without --model, the model has few layers, random weights and the widths of --widths, and the text is Python's own
manual, byte by byte. With --model, a folder that transformers loads, the text is tokenized by the model's tokenizer.
Under torchrun the experts are distributed over the ranks (expert parallelism).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pydoc_data.topics
import time
from pathlib import Path
from typing import Any

import sluice
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PrinterCallback,
    Qwen3MoeConfig,
    Trainer,
    TrainingArguments,
)

WIDTHS: dict[str, dict[str, int]] = {
    "small": {
        "hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    },
    "qwen3-30b-a3b": {
        "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    },
}  # fmt: skip
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))


def say(text: str) -> None:
    if RANK == 0:
        print(text, flush=True)


def token_ids(tokenizer: Any) -> torch.Tensor:
    """Every topic of Python's manual."""
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    if tokenizer is None:
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    return torch.tensor(tokenizer(text).input_ids)


def samples(ids: torch.Tensor, length: int) -> list[dict[str, torch.Tensor]]:
    rows = ids[: len(ids) // length * length].view(-1, length)
    return [{"input_ids": row, "labels": row} for row in rows]


def make_checkpoint(folder: Path, options: argparse.Namespace) -> None:
    """Random weights, as a checkpoint that is loaded like any other."""
    torch.manual_seed(0)
    shape = {"vocab_size": options.vocabulary, "num_hidden_layers": options.layers, **WIDTHS[options.widths]}
    config = Qwen3MoeConfig(**shape, max_position_embeddings=4 * options.length)
    AutoModelForCausalLM.from_config(config, dtype=options.dtype).save_pretrained(folder)


def load(folder: Path, options: argparse.Namespace) -> Any:
    shared: dict[str, Any] = {}
    if WORLD > 1:
        from transformers.distributed import DistributedConfig

        shared["distributed_config"] = DistributedConfig(fsdp_size=WORLD, ep_size=WORLD, ep_implementation="sluice")
    config = AutoConfig.from_pretrained(folder)
    if options.expert_format is not None:
        form = None if options.expert_format == "as-saved" else options.expert_format
        config = sluice.keep_quantised(config, form)
    return AutoModelForCausalLM.from_pretrained(
        folder, config=config, experts_implementation=options.experts, dtype=options.dtype, **shared
    )


def resident(name: str) -> float:
    """GiB of this process: VmRSS now, VmHWM at most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 2**20


def forget_peak() -> None:
    with contextlib.suppress(OSError):  # in a sandbox without this file, the peak includes loading
        Path("/proc/self/clear_refs").write_text("5")


class Reporting(Trainer):
    """Prints loss, tokens per second and memory while it trains."""

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log(logs, *args, **kwargs)
        if "loss" not in logs or RANK != 0:
            return
        now, step = time.perf_counter(), self.state.global_step
        since, before = getattr(self, "_reported", (self._began, 0))
        self._reported = now, step
        rate = (step - before) * self._tokens / (now - since)
        say(
            f"step {step:4d} of {self.state.max_steps}  loss {float(logs['loss']):.4f}  {rate:7.0f} tokens/s  "
            f"{resident('VmHWM'):.2f} GiB at most"
        )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        say(f"{resident('VmRSS'):.2f} GiB before training")
        forget_peak()
        self._began = time.perf_counter()
        return super().train(*args, **kwargs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a folder that transformers loads; default: random weights")
    parser.add_argument("--widths", choices=WIDTHS, default="small", help="of random weights")
    parser.add_argument("--layers", type=int, default=2, help="of random weights")
    parser.add_argument("--vocabulary", type=int, default=256, help="of random weights, at least 256")
    parser.add_argument("--adapt", choices=("experts", "attention"), default="experts", help="experts: attention, too")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--experts", default="sluice", help="experts_implementation")
    parser.add_argument(
        "--expert-format",
        choices=("mxfp4", "int4", "int8", "fp8", "as-saved"),
        help="keep frozen experts in 4 or 8 bits; as-saved: a checkpoint that is in MXFP4 or FP8",
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--out", type=Path, default=Path("tuned"))
    options = parser.parse_args()
    if WORLD > 1:
        torch.distributed.init_process_group("gloo")

    base = options.model
    if base is None:
        base = options.out / "base"
        if RANK == 0:
            make_checkpoint(base, options)
        if WORLD > 1:
            torch.distributed.barrier()
    tokenizer = None if options.model is None else AutoTokenizer.from_pretrained(base)
    model = load(base, options)
    torch.manual_seed(1)
    stacks = EXPERTS if options.adapt == "experts" else None
    config = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=ATTENTION, target_parameters=stacks)
    model = get_peft_model(model, config)
    trained, total = model.get_nb_trainable_parameters()
    say(f"{trained:,} of {total:,} parameters are trained")

    rows = samples(token_ids(tokenizer), options.length)
    arguments = TrainingArguments(
        output_dir=str(options.out / "trainer"),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        learning_rate=2e-3,
        logging_steps=max(1, options.steps // 10),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Reporting(model=model, args=arguments, train_dataset=rows[:-8], eval_dataset=rows[-8:])
    trainer.remove_callback(PrinterCallback)
    trainer._tokens = options.batch * options.length * WORLD
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    say(f"loss of unseen text: {before:.4f} before, {trainer.evaluate()['eval_loss']:.4f} after")

    prompt = rows[-1]["input_ids"][None, :32]
    with torch.no_grad():
        made = model.generate(
            input_ids=prompt, max_new_tokens=32, do_sample=False, pad_token_id=0, synced_gpus=WORLD > 1
        )[0, 32:]
    text = bytes(made.tolist()).decode(errors="replace") if tokenizer is None else tokenizer.decode(made)
    say(f"generated: {text!r}")
    model.save_pretrained(options.out / "adapter")
    if WORLD == 1:
        from sluice.adapters.transformers.merge import merge

        merge(base, options.out / "adapter", options.out / "merged")
    say(f"the adapter is in {options.out / 'adapter'}")
    if WORLD > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
