"""One step of ZeRO-1 offload in bf16: DeepSpeed's own beside Sluice's in one pass, in turns, in one process.

    .venv/bin/python -m integration_tests.benchmarks.optimizer_mixed [--parameters 128] [--threads 1 2] [--rounds 20]

Two engines of one rank, made by `deepspeed.initialize` from the same config, but for `"sluice": {"optimizer": true}`.
Timed is `engine.step()`; the forward and backward before it, which bring gradients to host memory and form their norm,
are the same code on both sides and are not.

bytes       that a step moves for each parameter: stock scales the f32 gradients in place (8), updates (28), copies the
            masters to a bf16 buffer (6) and that to the parameters (4), 46 in all. One pass reads the gradient, reads
            and writes masters and moments (28), and writes the bf16 parameter (2), 30 in all.
wanted      stock takes at least 1.3 times as long, or 0.9 of the ratio of those bytes where that is less, and 1.15 in
            any case: the lower end of the 95 % interval of the median over rounds
alike       after the rounds the masters of both differ by no more than a few roundings

With --check the exit code is 1 where something wanted is missed. How stock's op was built is in the record.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2]))

from integration_tests.benchmarks.measuring import records  # noqa: E402
from integration_tests.benchmarks.measuring.stats import median_of_pairs, quartiles  # noqa: E402
from integration_tests.benchmarks.optimizer.optimizer import stock_build  # noqa: E402

STOCK_BYTES, OWN_BYTES = 46, 30
WANTED = max(1.15, min(1.3, 0.9 * STOCK_BYTES / OWN_BYTES))
TENSOR = 4 << 20
SIDES = ("stock", "sluice")
OPTIONS = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


def engine_of(name: str, count: int) -> Any:
    """A model that is nothing but its parameters."""
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
    """Seconds of each side in each round, the first of which does not count; how far apart the masters ended."""
    import deepspeed
    import torch

    torch.set_num_threads(threads)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    sys.modules[deepspeed.comm.__name__ + ".torch"].build_shm_op = lambda: None  # minutes to compile, not used here
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
    apart = max((a - b).abs().max().item() for a, b in pairs)
    updates = engines["sluice"].optimizer.optimizer.ds_opt_adam.updates
    assert updates == rounds + 1, f"{updates} updates by the library in {rounds + 1} steps"
    return {"seconds": seconds, "apart": apart}


def judge(found: dict[str, Any]) -> dict[str, Any]:
    """The ratio of both times beside what is wanted."""
    seconds = found["seconds"]
    pairs = zip(seconds["stock"], seconds["sluice"], strict=True)
    over = median_of_pairs([stock / mine for stock, mine in pairs])
    result = {"seconds": {name: quartiles(each) for name, each in seconds.items()}, "stock_over_sluice": over}
    # Each of 20 steps moves an element by about lr; bf16 gradients are the same, roundings of f32 differ.
    return {**result, "apart": found["apart"], "kept": over["low"] >= WANTED and found["apart"] < 1e-5}


def main() -> int:
    """Measures each number of threads in a process of its own, prints and writes what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=128, metavar="MILLIONS")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--records", type=Path, help="folder for the record")
    parser.add_argument("--check", action="store_true", help="fail where something wanted is missed")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds < 1 or args.parameters < 1 or min(args.threads) < 1:
        parser.error("--rounds, --parameters and --threads are at least 1")
    if args.measure:
        print("found", json.dumps(measure(args.parameters, args.measure, args.rounds)))
        return 0
    found = {}
    for threads in args.threads:
        own = [sys.executable, "-m", "integration_tests.benchmarks.optimizer_mixed", "--measure", str(threads)]
        own += ["--parameters", str(args.parameters), "--rounds", str(args.rounds)]
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        environment = {**os.environ, **place, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(threads)}
        run = subprocess.run(own, stdout=subprocess.PIPE, text=True, check=True, cwd=HERE.parents[2], env=environment)
        line = next(line for line in run.stdout.splitlines() if line.startswith("found "))
        found[str(threads)] = each = judge(json.loads(line.removeprefix("found ")))
        over = each["stock_over_sluice"]
        print(
            f"{threads} threads: stock / Sluice {over['median']:.2f} [{over['low']:.2f}, {over['high']:.2f}], "
            f"wanted {WANTED:.2f}; masters {each['apart']:.1e} apart",
            flush=True,
        )
    if args.records is not None:
        bytes_moved = {"stock": STOCK_BYTES, "sluice": OWN_BYTES}
        settings = {"millions": args.parameters, "rounds": args.rounds, "options": OPTIONS, "bytes": bytes_moved}
        summary = {"settings": settings, "stock_build": stock_build(), "wanted": WANTED, "threads": found}
        records.write(args.records / "optimizer_mixed.json", summary)
    kept = all(each["kept"] for each in found.values())
    print("all is as wanted" if kept else "something wanted is missed", flush=True)
    return int(args.check and not kept)


if __name__ == "__main__":
    sys.exit(main())
