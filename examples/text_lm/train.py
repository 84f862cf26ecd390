#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains the text model with DeepSpeed: the script that a user has anyway.

    deepspeed --num_gpus 2 train.py            (two ranks on this machine's CPU: DS_ACCELERATOR=cpu)

It does not mention Sluice; the key in ds_config.json enables it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import deepspeed
import torch
from data import Batches
from model import Shape, TextLM


def main() -> None:
    """Train and print the loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--config", default=str(Path(__file__).with_name("ds_config.json")))
    parser.add_argument("--local_rank", type=int, default=0, help="given by the deepspeed launcher")
    args = parser.parse_args()

    deepspeed.init_distributed()
    rank = torch.distributed.get_rank()
    shape = Shape()
    torch.manual_seed(args.seed)
    model = TextLM(shape)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=args.config)
    batches = Batches(args.seed, rank, engine.train_micro_batch_size_per_gpu(), shape.length)

    begin = time.perf_counter()
    for step in range(args.steps):
        total, loss = engine(*batches[step])
        engine.backward(total)
        engine.step()
        if rank == 0 and (step % 10 == 0 or step == args.steps - 1):
            rate = (step + 1) / (time.perf_counter() - begin)
            print(f"step {step:4d}  loss {loss.item():.4f}  {rate:.2f} steps/s", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
