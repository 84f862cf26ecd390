# SPDX-License-Identifier: Apache-2.0
"""Times one step of ZeRO-1 offload in bf16, by DeepSpeed and by Sluice in one pass, in turns, in one process.

Both engines have one rank and come from `deepspeed.initialize` with the same config, except for
`"sluice": {"optimizer": true}`. The benchmark times `engine.step()`. The forward and backward before it run the same
code on both sides, and are not timed.

bytes       that a step moves for each parameter: stock scales the f32 gradients in place (8), updates (28), copies the
            masters to a bf16 buffer (6) and this buffer to the parameters (4), 46 in all. Sluice's one pass reads the
            gradient and reads and writes masters and moments (28), and writes the bf16 parameter (2), 30 in all.
"""

import sys
import time
from typing import Any

from integration_tests.benchmarks.measuring.stats import median_of_pairs, quartiles

STOCK_BYTES, OWN_BYTES = 46, 30
WANTED = max(1.15, min(1.3, 0.9 * STOCK_BYTES / OWN_BYTES))
TENSOR = 4 << 20
SIDES = ("stock", "sluice")
MOST_APART = 1e-5  # each of 20 steps changes an element by about lr, and f32 roundings differ
OPTIONS = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


def engine_of(name: str, count: int) -> Any:
    """An engine for a model that consists only of parameters."""
    import deepspeed
    import torch

    class Bag(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.all = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(TENSOR)) for _ in range(count))

        def forward(self, factor: torch.Tensor) -> torch.Tensor:
            return sum((p * factor).sum() for p in self.all)

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": OPTIONS},
    }
    if name == "sluice":
        config["sluice"] = {"enabled": True, "optimizer": True, "on_unsupported": "warn"}
    model = Bag()
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def measure(millions: int, threads: int, rounds: int) -> dict[str, Any]:
    """Seconds of each side in each round after the first, and the final difference of the masters."""
    import deepspeed
    import torch

    torch.set_num_threads(threads)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    sys.modules[deepspeed.comm.__name__ + ".torch"].build_shm_op = lambda: None  # slow to compile, not used here
    count = (millions * 1_000_000 + TENSOR - 1) // TENSOR
    engines = {name: engine_of(name, count) for name in SIDES}
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    for number in range(rounds + 1):
        for name in SIDES if number % 2 else SIDES[::-1]:
            engine = engines[name]
            factor = torch.full((TENSOR,), 1e-4 * (1 + number), dtype=torch.bfloat16)
            engine.backward(engine(factor))
            begin = time.perf_counter()
            engine.step()
            if number > 0:
                seconds[name].append(time.perf_counter() - begin)
        print(f"{threads} threads, round {number} of {rounds}", file=sys.stderr, flush=True)
    pairs = zip(*(engines[name].optimizer.single_partition_of_fp32_groups for name in SIDES), strict=True)
    difference = max((a - b).abs().max().item() for a, b in pairs)
    updates = engines["sluice"].optimizer.optimizer.ds_opt_adam.updates
    assert updates == rounds + 1, f"{updates} updates by the library in {rounds + 1} steps"
    return {"seconds": seconds, "apart": difference}


def judged(found: dict[str, Any], threads: int) -> dict[str, Any]:
    """The row of the record for one number of threads."""
    seconds = found["seconds"]
    ratios = [stock / mine for stock, mine in zip(seconds["stock"], seconds["sluice"], strict=True)]
    middle = {name: quartiles(each)["median"] for name, each in seconds.items()}
    row = {"step": "mixed", "threads": threads, "seconds": middle, "stock_over_sluice": median_of_pairs(ratios)}
    return row | {"apart": found["apart"]}
