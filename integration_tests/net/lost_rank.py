# SPDX-License-Identifier: Apache-2.0
"""Runs passes of a layer until a rank is cut off. Each rank of lost_rank_test runs it.

A rank prints its progress in lines. The others than rank 0 begin the second pass when the file `argv[1]` exists.
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from sluice.adapters.torch import Context, EpGroup, MoeConfig, MoeLayer
from sluice.errors import SluiceError

DEADLINE = timedelta(seconds=150)
WIDTH, TOKENS = 512, 64


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=DEADLINE)
    world, rank = dist.get_world_size(), dist.get_rank()
    group = EpGroup.for_ranks(range(world), timeout=DEADLINE, transport="tcp")
    config = MoeConfig(model_width=WIDTH, hidden_width=8, num_experts=world, top_k=1, chunks=2)
    layer, ids = MoeLayer(Context(group), config), (torch.arange(TOKENS) % world).reshape(-1, 1)
    params = [{"w1": torch.ones(8, WIDTH) / WIDTH, "w2": torch.ones(WIDTH, 8)}]
    try:
        with torch.no_grad():
            layer(torch.ones(TOKENS, WIDTH), ids, torch.ones(TOKENS, 1), params)
            print("ready", flush=True)
            while rank != 0 and not os.path.exists(sys.argv[1]):
                time.sleep(0.02)
            layer(torch.ones(TOKENS, WIDTH), ids, torch.ones(TOKENS, 1), params)
            print("passed", flush=True)
    except SluiceError as error:
        print(f"lost {type(error).__name__} {error.peer} {time.monotonic():.3f} {error}", flush=True)
    os._exit(0)  # ranks that are cut off cannot destroy the group in order


if __name__ == "__main__":
    main()
