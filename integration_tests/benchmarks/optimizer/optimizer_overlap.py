"""A step over two ranks whose sum takes as long as its update: beside each other, and in turns.

    .venv/bin/python -m integration_tests.benchmarks.optimizer_overlap [--parameters 32] [--threads 1] [--rounds 20]

The other rank and the link are not there. A communicator of callbacks hands back what was sent, and each exchange ends
when a link of a given rate would have carried it: slept, so that the sum takes no core but for its additions. The rate
is set so that all sums take the time of an update.

update      of the same arrays without a communicator
sum         what a step spends in sums, all in one chunk
serial      k = all buckets: the sum, then the update
beside      k as the step chooses it
wanted      beside at most 1.10 of the longer of sum and update, and one chunk's sum; and serial at least 1.4 of beside

Medians of rounds in which each runs once. With --check the exit code is 1 where something wanted is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2]))

from integration_tests.benchmarks.measuring import records  # noqa: E402
from integration_tests.benchmarks.measuring.stats import median_of_pairs, quartiles  # noqa: E402

TENSOR = 4 << 20
BUCKET = 1 << 20
ALL = (1 << 63) - 1
MOST_OF_LONGER, LEAST_OF_SERIAL = 1.10, 1.4


class Link:
    """A communicator of two ranks, of which the other one sends what it gets, over a link of `rate` bytes a second."""

    def __init__(self, library: Any) -> None:
        self.rate = float("inf")
        self._ffi, self._free, self._ends = library.ffi, 0.0, {}
        ffi = library.ffi
        size = ffi.sizeof("sluice_host_comm_vtable_t")
        self._vtable = ffi.new("sluice_host_comm_vtable_t *", {"struct_size": size})
        types = ffi.typeof("sluice_host_comm_vtable_t").fields
        fields = {name: field.type for name, field in types}
        self._start = ffi.callback(fields["exchange_start"], self.start)
        self._wait = ffi.callback(fields["exchange_wait"], self.wait)
        self._vtable.exchange_start, self._vtable.exchange_wait = self._start, self._wait
        config = library.new("comm_config")
        config.rank, config.world_size = 0, 2
        out = ffi.new("sluice_comm_t **")
        library.check(library.lib.sluice_comm_create_host(config, self._vtable, ffi.NULL, out))
        self.comm = ffi.gc(out[0], library.lib.sluice_comm_destroy)

    def start(self, user: Any, exchange: Any, out_request: Any, failure: Any) -> int:
        sent, received = exchange.send_bytes[1], exchange.recv_bytes[1]
        if sent and received:
            self._ffi.memmove(exchange.recv[1], exchange.send[1], min(sent, received))
        self._free = max(self._free, time.perf_counter()) + max(sent, received) / self.rate
        number = len(self._ends) + 1
        while number in self._ends:
            number += 1
        self._ends[number] = self._free
        out_request[0] = self._ffi.cast("void *", number)
        return 0

    def wait(self, user: Any, request: Any, timeout_ns: int, failure: Any) -> int:
        left = self._ends.pop(int(self._ffi.cast("uintptr_t", request))) - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return 0


class Step:
    """One step of AdamW in f32 over arrays of its own."""

    def __init__(self, library: Any, millions: int) -> None:
        import torch

        ffi, self._library = library.ffi, library
        count = (millions * 1_000_000 + TENSOR - 1) // TENSOR
        torch.manual_seed(1)
        self._kept = [[torch.randn(TENSOR) * 1e-2 for _ in range(2)] for _ in range(count)]
        self._tensors = ffi.new("sluice_optimizer_tensor_t[]", count)
        for tensor, arrays in zip(self._tensors, self._kept):
            arrays += [torch.zeros(TENSOR), torch.zeros(TENSOR)]
            param, grad, first, second = (each.data_ptr() for each in arrays)
            tensor.count, tensor.step = TENSOR, 1
            tensor.param, tensor.grad = ffi.cast("void *", param), ffi.cast("void *", grad)
            tensor.exp_avg, tensor.exp_avg_sq = ffi.cast("float *", first), ffi.cast("float *", second)
            tensor.param_dtype = tensor.grad_dtype = ffi.integer_const("SLUICE_DTYPE_F32")
        self._group = library.new("optimizer_group")
        self._group.tensors, self._group.num_tensors = self._tensors, count
        self._groups = ffi.new("sluice_optimizer_group_t *[]", [self._group])
        out = ffi.new("sluice_optimizer_t **")
        library.check(library.lib.sluice_optimizer_create(library.new("optimizer_config"), out))
        self._optimizer = ffi.gc(out[0], library.lib.sluice_optimizer_destroy)
        self.bytes = 4 * TENSOR * count
        self.buckets = (TENSOR * count + BUCKET - 1) // BUCKET

    def run(self, comm: Any = None, buckets: int = 0) -> tuple[float, Any]:
        """Seconds, and what the step says."""
        library = self._library
        args, result = library.new("optimizer_step_args"), library.new("optimizer_step_result")
        args.groups, args.num_groups, args.check_finite = self._groups, 1, 0
        args.bucket, args.sum_buckets, args.loss_scale = BUCKET, buckets, 2.0
        if comm is not None:
            args.comm = comm
        begin = time.perf_counter()
        library.check(library.lib.sluice_optimizer_step(self._optimizer, args, result))
        return time.perf_counter() - begin, result


def measure(millions: int, threads: int, rounds: int) -> dict[str, Any]:
    """Seconds of each by round, and k as it was chosen in the last."""
    import torch
    from sluice._library import load

    torch.set_num_threads(threads)
    library = load()
    step, link = Step(library, millions), Link(library)
    update = min(step.run()[0] for _ in range(4))
    link.rate = step.bytes / update  # two ranks: half of it as gradients, half as sums, both ways at once
    step.run(link.comm, ALL)
    seconds: dict[str, list[float]] = {name: [] for name in ("update", "sum", "serial", "beside")}
    chosen = 0
    for number in range(rounds + 1):
        alone, (serial, told), (beside, taken) = step.run()[0], step.run(link.comm, ALL), step.run(link.comm)
        chosen = taken.sum_buckets
        if number > 0:
            each = {"update": alone, "sum": told.sum_ns * 1e-9, "serial": serial, "beside": beside}
            for name, value in each.items():
                seconds[name].append(value)
    return {"seconds": seconds, "k": min(chosen, step.buckets), "buckets": step.buckets}


def judge(found: dict[str, Any]) -> dict[str, Any]:
    """What is wanted beside what was found."""
    seconds = found["seconds"]
    median = {name: statistics.median(each) for name, each in seconds.items()}
    chunk = median["sum"] * found["k"] / found["buckets"]
    most = MOST_OF_LONGER * max(median["sum"], median["update"]) + chunk
    gain = median_of_pairs([a / b for a, b in zip(seconds["serial"], seconds["beside"], strict=True)])
    kept = median["beside"] <= most and gain["median"] >= LEAST_OF_SERIAL
    quarters = {name: quartiles(each) for name, each in seconds.items()}
    return {**found, "seconds": quarters, "at_most": most, "serial_over_beside": gain, "kept": kept}


def main() -> int:
    """Prints and writes what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=32, metavar="MILLIONS")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--records", type=Path, help="folder for the record")
    parser.add_argument("--check", action="store_true", help="fail where something wanted is missed")
    args = parser.parse_args()
    if min(args.rounds, args.parameters, args.threads) < 1:
        parser.error("--rounds, --parameters and --threads are at least 1")
    found = judge(measure(args.parameters, args.threads, args.rounds))
    medians = {name: each["median"] * 1e3 for name, each in found["seconds"].items()}
    print("  ".join(f"{name} {value:.1f} ms" for name, value in medians.items()))
    gain = found["serial_over_beside"]
    print(
        f"k {found['k']} of {found['buckets']} buckets; beside at most {found['at_most'] * 1e3:.1f} ms wanted;", end=" "
    )
    print(f"serial / beside {gain['median']:.2f} [{gain['low']:.2f}, {gain['high']:.2f}], 1.4 wanted")
    if args.records is not None:
        settings = {"millions": args.parameters, "threads": args.threads, "rounds": args.rounds, "bucket": BUCKET}
        records.write(args.records / "optimizer_overlap.json", {"settings": settings, **found})
    print("all is as wanted" if found["kept"] else "something wanted is missed", flush=True)
    return int(args.check and not found["kept"])


if __name__ == "__main__":
    sys.exit(main())
