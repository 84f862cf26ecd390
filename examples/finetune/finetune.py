# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes an MoE model with LoRA on CPUs: Trainer or TRL's SFTTrainer, PEFT, and the experts on Sluice; trains,
evaluates, generates, saves the adapter, and merges it into a checkpoint.

    .venv/bin/python examples/finetune/finetune.py [--model FOLDER] [--trainer sft] [--out tuned] [--steps 40]
    .venv/bin/torchrun --nproc-per-node 2 examples/finetune/finetune.py [--adapt attention]

Without --model, the model has few layers, random weights and the widths of --widths, and the text is Python's own
manual, byte by byte. With --model, a folder that transformers loads, the text is tokenized by the model's tokenizer.
Under torchrun the experts are distributed over the ranks (expert parallelism).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import pydoc_data.topics
import sys
import time
from pathlib import Path
from typing import Any

import sluice
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3MoeConfig,
    Trainer,
    TrainerCallback,
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


def samples(tokenizer: Any, length: int) -> list[dict[str, list[int]]]:
    """Every topic of Python's manual, in pieces of `length` tokens."""
    topics = pydoc_data.topics.topics
    ids = tokenizer("\n".join(topics[name] for name in sorted(topics))).input_ids
    rows = [ids[first : first + length] for first in range(0, len(ids) - length + 1, length)]
    return [{"input_ids": row, "labels": row} for row in rows]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token is a byte and has its value. Byte 0 ends a text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())  # a printable byte is written as itself
    others = iter([letter for letter in letters if ord(letter) >= 256])
    vocabulary = {chr(byte) if chr(byte) in letters else next(others): byte for byte in range(256)}
    made = Tokenizer(models.BPE(vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    end = made.id_to_token(0)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end, pad_token=end)


def make_checkpoint(folder: Path, options: argparse.Namespace) -> None:
    """Random weights and a tokenizer, as a checkpoint that is loaded like any other."""
    torch.manual_seed(0)
    shape = {"vocab_size": options.vocabulary, "num_hidden_layers": options.layers, **WIDTHS[options.widths]}
    config = Qwen3MoeConfig(**shape, max_position_embeddings=4 * options.length)
    AutoModelForCausalLM.from_config(config, dtype=options.dtype).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


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


class Progress(TrainerCallback):
    """Prints loss, tokens per second and memory while a model is trained."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens  # of all ranks in a step

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        say(f"{resident('VmRSS'):.2f} GiB before training")
        forget_peak()
        self._reported = time.perf_counter(), 0

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **others: Any) -> None:
        if "loss" not in logs:
            return
        now, (since, before) = time.perf_counter(), self._reported
        self._reported = now, state.global_step
        rate = (state.global_step - before) * self._tokens / (now - since)
        say(
            f"step {state.global_step:4d} of {state.max_steps}  loss {float(logs['loss']):.4f}  {rate:7.0f} tokens/s  "
            f"{resident('VmHWM'):.2f} GiB at most"
        )


def make_trainer(kind: str, settings: dict[str, Any], rows: list[Any], **both: Any) -> Trainer:
    """Returns transformers' Trainer, or TRL's for supervised fine-tuning."""
    if kind == "trainer":
        return Trainer(args=TrainingArguments(**settings), train_dataset=rows[:-8], eval_dataset=rows[-8:], **both)
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    # SFTConfig's own values of the first three differ from Trainer's. The rows are tokens already.
    settings |= {"bf16": False, "gradient_checkpointing": False, "router_aux_loss_coef": 0.0}
    settings["dataset_kwargs"] = {"skip_prepare_dataset": True}
    train, unseen = (Dataset.from_list(part) for part in (rows[:-8], rows[-8:]))
    return SFTTrainer(args=SFTConfig(**settings), train_dataset=train, eval_dataset=unseen, **both)


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
    parser.add_argument("--trainer", choices=("trainer", "sft"), default="trainer", help="sft: TRL's SFTTrainer")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--out", type=Path, default=Path("tuned"))
    options = parser.parse_args()
    if options.trainer == "sft" and importlib.util.find_spec("trl") is None:
        sys.exit("--trainer sft needs TRL: python -m pip install trl==1.16.0")
    if WORLD > 1:
        torch.distributed.init_process_group("gloo")

    base = options.model
    if base is None:
        base = options.out / "base"
        if RANK == 0:
            make_checkpoint(base, options)
        if WORLD > 1:
            torch.distributed.barrier()
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = load(base, options)
    torch.manual_seed(1)
    stacks = EXPERTS if options.adapt == "experts" else None
    config = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=ATTENTION, target_parameters=stacks)
    model = get_peft_model(model, config)
    trained, total = model.get_nb_trainable_parameters()
    say(f"{trained:,} of {total:,} parameters are trained")

    rows = samples(tokenizer, options.length)
    settings = {
        "output_dir": str(options.out / "trainer"),
        "max_steps": options.steps,
        "per_device_train_batch_size": options.batch,
        "learning_rate": 2e-3,
        "logging_steps": max(1, options.steps // 10),
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    progress = Progress(options.batch * options.length * WORLD)
    trainer = make_trainer(
        options.trainer, settings, rows, model=model, processing_class=tokenizer, callbacks=[progress]
    )
    trainer.remove_callback(PrinterCallback)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    say(f"loss of unseen text: {before:.4f} before, {trainer.evaluate()['eval_loss']:.4f} after")

    prompt = torch.tensor([rows[-1]["input_ids"][:32]])
    with torch.no_grad():
        made = model.generate(
            input_ids=prompt, max_new_tokens=32, do_sample=False, pad_token_id=0, synced_gpus=WORLD > 1
        )[0, 32:]
    say(f"generated: {tokenizer.decode(made)!r}")
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
