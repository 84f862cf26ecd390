# SPDX-License-Identifier: Apache-2.0
"""Ranks of stock.py: counts and times of stock layers, measured in turns with the rates of the machine."""

import ctypes
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from integration_tests.benchmarks.hosts import stock_rates
from integration_tests.benchmarks.measuring import parts
from integration_tests.benchmarks.measuring.rank import Rank

WARM_UP = 2
# A layer with hardly any arithmetic and rows: its time is the host's overhead, which is divided by its torch calls.
BARE = {"T": 16, "M": 16, "H": 16, "E": 16, "K": 2, "skew": 1.0}
BARE_STEPS = 5
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt parameters in malloc.h


class Layer:
    """A stock layer of a cell; forward and backward with fresh gradients."""

    def __init__(self, cell: dict[str, Any]) -> None:
        self.cell = cell
        if cell["host"] == "DeepSpeed":
            from integration_tests.benchmarks.layer.cells import Cell
            from integration_tests.benchmarks.layer.layer_rank import Bench

            shape = {name: cell[name] for name in ("T", "M", "H", "E", "K", "skew")}
            bench = Bench(Cell("stock", W=dist.get_world_size(), **shape), 1, {})
            self.module, self.tokens = bench.stock, bench.x
            self.call = lambda x: bench.stock(x)[0]
        else:
            from integration_tests.benchmarks.hosts import megatron_rank

            sides = megatron_rank.make({**cell, "gated": False, "dtype": "float32"})
            stock = sides.layers["stock"]
            self.module, self.tokens = stock, sides.tokens
            self.call = lambda x: sides.call(stock, x)
        self.gradient = torch.randn(self.tokens.shape, generator=torch.Generator().manual_seed(5))

    def step(self) -> None:
        self.module.zero_grad(set_to_none=True)
        x = self.tokens.detach().requires_grad_()
        self.call(x).backward(self.gradient)

    def counted(self) -> dict[str, float]:
        """Flops, torch calls, bytes sent to other ranks, and bytes of rows that the forward saves."""
        rows: dict[int, int] = {}
        own = {parameter.untyped_storage().data_ptr() for parameter in self.module.parameters()}
        x = self.tokens.detach().requires_grad_()
        own.add(x.untyped_storage().data_ptr())
        widths = (self.cell["M"], self.cell["H"])
        sent = 0.0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            rowlike = tensor.is_floating_point() and tensor.dim() > 1 and tensor.shape[-1] in widths
            if rowlike and storage.data_ptr() not in own:
                rows[storage.data_ptr()] = storage.nbytes()
            return tensor

        exchange = dist.all_to_all_single

        def counting(*args: Any, **kwargs: Any) -> Any:
            nonlocal sent
            send = args[1] if len(args) > 1 else kwargs["input"]
            sizes = kwargs.get("input_split_sizes")
            stays = len(send) // dist.get_world_size() if sizes is None else int(sizes[dist.get_rank()])
            sent += (len(send) - stays) * send.element_size() * (send.numel() // len(send))
            return exchange(*args, **kwargs)

        dist.all_to_all_single = counting
        try:
            with FlopCounterMode(display=False) as flops:
                self.step()
        finally:
            dist.all_to_all_single = exchange
        with stock_rates.Calls() as calls:  # in a separate step: the other counters make torch calls too
            self.step()
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            self.call(x)
        return {"flops": flops.get_total_flops(), "calls": calls.count, "sent": sent, "kept": sum(rows.values())}


def measure(rank: Rank, cells: list[dict[str, Any]], tell: Any) -> list[dict[str, Any]]:
    """Measures cells of the same widths, in turns with the machine's rates."""
    # CPU time leaves out other processes. Over loopback it contains the exchanges.
    clock = time.perf_counter if rank.plan["has_link"] else time.process_time
    layers = [Layer(cell) for cell in cells]
    bare = Layer({**cells[0], **BARE})
    bare_calls = bare.counted()["calls"]
    counts = [layer.counted() for layer in layers]
    samples: stock_rates.Samples = {}
    took: list[list[float]] = [[] for _ in layers]
    for _ in range(rank.plan["rounds"]):
        stock_rates.sample(cells[0]["M"], cells[0]["H"], clock, samples)
        began = time.thread_time()  # without waiting in exchanges
        for _ in range(BARE_STEPS):
            bare.step()
        samples.setdefault(("op",), []).append((time.thread_time() - began) / (BARE_STEPS * bare_calls))
        for layer, found in zip(layers, took):
            for number in range(WARM_UP + rank.plan["steps"]):
                dist.barrier()
                began = clock()
                layer.step()
                if number >= WARM_UP:
                    found.append(clock() - began)
        tell()
    machine, op = stock_rates.machine({key: parts.slowest(found) for key, found in samples.items()})
    return [
        {**cell, "counted": count, "seconds": statistics.median(parts.slowest(found)), "machine": machine, "op": op}
        for cell, count, found in zip(cells, counts, took)
    ]


def keep_memory() -> None:
    """Makes malloc keep freed memory, for both rates and layers. By default it depends on other blocks of the heap
    whether the system takes memory back and maps it again in each step."""
    libc = ctypes.CDLL(None)
    for parameter in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
        libc.mallopt(parameter, 1 << 30)


def main() -> None:
    """Measures all cells of the plan, grouped by widths."""
    keep_memory()
    torch.set_num_threads(1)
    if json.loads(Path(sys.argv[1]).read_text())["cells"][0]["host"] == "Megatron-Core":
        from integration_tests.megatron import cpu_shim  # noqa: F401  # before megatron

        dist.init_process_group("gloo")
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(1, 1, expert_model_parallel_size=dist.get_world_size())
    else:
        import deepspeed

        deepspeed.init_distributed()
    rank = Rank()
    by_widths: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for cell in rank.plan["cells"]:
        by_widths.setdefault((cell["M"], cell["H"]), []).append(cell)
    done = [0]

    def tell() -> None:
        done[0] += 1
        rank.report(done=done[0], of=len(by_widths) * rank.plan["rounds"])

    rank.leave([line for cells in by_widths.values() for line in measure(rank, cells, tell)])


if __name__ == "__main__":
    main()
