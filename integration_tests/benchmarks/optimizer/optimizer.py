"""One step of AdamW in f32: Sluice, DeepSpeed's CPUAdam and torch's fused AdamW in turns, beside a stream of bytes.

    .venv/bin/python -m integration_tests.benchmarks.optimizer [--parameters 128] [--threads 1 2] [--rounds 20]
        [--clock cpu]

Every side has parameters, gradients and moments of its own, of the same shapes and values. A round runs each side
once, each time in another order; ratios are of one round. Brackets hold the 95 % interval of the median over rounds.

sluice      told that gradients are finite (`check_finite=False`), which no other side looks at either
checked     as it is by default: gradients are read once more, and change nothing where one is not finite
stream      `a.add_(b)` over the same arrays until as many bytes were moved as a step has to: parameter, m and v read
            and written, the gradient read, 28 bytes a parameter
DeepSpeed   its C++ op, built by its own builder on this machine; the record has the compiler's arguments.
clock       of the wall; or the CPU time of the process, for a machine with others on it, and for one thread (the
            threads of OpenMP turn while they wait)
wanted      Sluice is not slower than either: the lower end of the interval at least 0.97; and at least 0.85 of the
            stream

With --check the exit code is 1 where something wanted is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2]))

from integration_tests.benchmarks.measuring import records  # noqa: E402
from integration_tests.benchmarks.measuring.stats import median_of_pairs, quartiles  # noqa: E402

SIDES = ("sluice", "checked", "deepspeed", "torch_fused", "stream")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
BYTES_PER_PARAMETER = 28
LEAST_OF_HOST, LEAST_OF_STREAM = 0.97, 0.85
TENSOR = 4 << 20  # elements of one parameter
OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def parameters_of(millions: int) -> list[Any]:
    """So many parameters in tensors of a large layer, with gradients; the same values for every side."""
    import torch

    torch.manual_seed(1)
    count = (millions * 1_000_000 + TENSOR - 1) // TENSOR
    params = [torch.nn.Parameter(torch.randn(TENSOR)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn(TENSOR) * 1e-2
    return params


def stream(millions: int) -> Callable[[], None]:
    """Moves the bytes of a step by additions in place: two numbers read and one written."""
    params = parameters_of(millions)
    pairs = [(param.data, param.grad) for param in params]
    additions = BYTES_PER_PARAMETER * sum(len(param) for param in params) / (12 * TENSOR)

    def run() -> None:
        for index in range(round(additions)):
            a, b = pairs[index % len(pairs)]
            a.add_(b, alpha=1e-9)

    return run


def side(name: str, millions: int) -> Callable[[], Any]:
    """A call that makes one step."""
    import torch

    if name == "stream":
        return stream(millions)
    params = parameters_of(millions)
    if name in ("sluice", "checked"):
        from sluice.optim import AdamW

        return AdamW(params, check_finite=name == "checked", **OPTIONS).step
    if name == "torch_fused":
        return torch.optim.AdamW(params, fused=True, **OPTIONS).step
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(params, adamw_mode=True, **OPTIONS).step


def measure(millions: int, threads: int, rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each side in each round, the first of which does not count."""
    import torch

    torch.set_num_threads(threads)
    steps = {name: side(name, millions) for name in SIDES}
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    for number in range(rounds + 1):
        first = number % len(SIDES)
        for name in SIDES[first:] + SIDES[:first]:
            begin = clock()
            steps[name]()
            if number > 0:
                seconds[name].append(clock() - begin)
        print(f"{threads} threads, round {number} of {rounds}", file=sys.stderr, flush=True)
    return seconds


def stock_build() -> dict[str, Any]:
    """How DeepSpeed builds its op here."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    compiler = subprocess.run(["c++", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    return {"compiler": compiler, "arguments": " ".join(CPUAdamBuilder().cxx_args())}


def judge(seconds: dict[str, list[float]], parameters: int) -> dict[str, Any]:
    """Ratios of each side's time over Sluice's, and of its bytes over the stream's."""
    found: dict[str, Any] = {"seconds": {name: quartiles(each) for name, each in seconds.items()}}
    for name in SIDES[1:]:
        pairs = zip(seconds[name], seconds["sluice"], strict=True)
        found[f"over_{name}"] = median_of_pairs([other / mine for other, mine in pairs])
    rate = BYTES_PER_PARAMETER * parameters / found["seconds"]["stream"]["median"]
    found["stream_gb_per_s"] = rate / 1e9
    hosts = all(found[f"over_{name}"]["low"] >= LEAST_OF_HOST for name in ("deepspeed", "torch_fused"))
    found["kept"] = hosts and found["over_stream"]["median"] >= LEAST_OF_STREAM
    return found


def show(threads: int, found: dict[str, Any]) -> str:
    """A line for each other side."""
    mine = found["seconds"]["sluice"]["median"]
    lines = [f"{threads} thread(s): a step takes {mine * 1e3:.0f} ms; the stream {found['stream_gb_per_s']:.1f} GB/s"]
    for name in SIDES[1:]:
        ratio, wanted = found[f"over_{name}"], LEAST_OF_STREAM if name == "stream" else LEAST_OF_HOST
        time_of = found["seconds"][name]["median"] * 1e3
        what = "wanted" if name == "stream" else "wanted of the lower end"
        wish = "" if name == "checked" else f", {what}: {wanted}"
        lines.append(
            f"  {name:<12} {time_of:5.0f} ms  {ratio['median']:.2f}x [{ratio['low']:.2f} .. {ratio['high']:.2f}]{wish}"
        )
    return "\n".join(lines)


def main() -> int:
    """Measures in a process of its own for each number of threads, prints and writes what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=128, metavar="MILLIONS")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--records", type=Path, help="folder for the record")
    parser.add_argument("--check", action="store_true", help="fail where something wanted is missed")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds < 1 or args.parameters < 1 or min(args.threads) < 1:
        parser.error("--rounds, --parameters and --threads are at least 1")
    if args.measure:
        print("seconds", json.dumps(measure(args.parameters, args.measure, args.rounds, CLOCKS[args.clock])))
        return 0
    found = {}
    count = (args.parameters * 1_000_000 + TENSOR - 1) // TENSOR * TENSOR
    for threads in args.threads:
        own = [sys.executable, "-m", "integration_tests.benchmarks.optimizer", "--measure", str(threads)]
        own += ["--parameters", str(args.parameters), "--rounds", str(args.rounds), "--clock", args.clock]
        run = subprocess.run(own, stdout=subprocess.PIPE, text=True, check=True, cwd=HERE.parents[2])
        line = next(line for line in run.stdout.splitlines() if line.startswith("seconds "))
        found[str(threads)] = judge(json.loads(line.removeprefix("seconds ")), count)
        print(show(threads, found[str(threads)]), flush=True)
    if args.records is not None:
        settings = {
            "parameters": count,
            "rounds": args.rounds,
            "tensor": TENSOR,
            "clock": args.clock,
            "options": OPTIONS,
        }
        records.write(
            args.records / "optimizer.json", {"settings": settings, "stock_build": stock_build(), "threads": found}
        )
    kept = all(each["kept"] for each in found.values())
    print("all is as wanted" if kept else "something wanted is missed", flush=True)
    return int(args.check and not kept)


if __name__ == "__main__":
    sys.exit(main())
