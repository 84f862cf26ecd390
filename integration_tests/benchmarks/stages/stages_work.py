# SPDX-License-Identifier: Apache-2.0
"""The work of a stage of pipeline benchmarks: sleep of planned or drawn length, or linear layers; stalling links."""

from __future__ import annotations

import contextlib
import functools
import math
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from integration_tests.benchmarks.measuring.rank import Rank, gather, seconds_of
from integration_tests.benchmarks.stages.stages_simulated import STALL_S, drawn_seconds, gaps
from integration_tests.net.namespaces import DEVICE, QUEUE_S, SUBNET, burst_bytes, parse_rate

WIDTH = 1024  # width of the linear layers


# ---- sleep, so that ranks that share cores do not slow each other down ----

SPUN_S = 2e-4  # the end of the time is spent in a loop, because a sleep may end late by about this much


def _until(end: float) -> None:
    time.sleep(max(0.0, end - SPUN_S - time.perf_counter()))
    while time.perf_counter() < end:
        pass


class Sleep(torch.autograd.Function):
    """Multiplies by the first weight. seconds: of "forward" and "backward", which include the arithmetic."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: Callable[[str], float]) -> torch.Tensor:
        end = time.perf_counter() + seconds("forward")
        ctx.seconds = seconds
        ctx.save_for_backward(weight)
        out = x * weight[0]
        _until(end)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        end = time.perf_counter() + ctx.seconds("backward")
        (weight,) = ctx.saved_tensors
        own = torch.zeros_like(weight)
        own[0] = grad.mean()
        out = grad * weight[0]
        _until(end)
        return out, own, None


# ---- stages ----


class Stage(nn.Module):
    """One stage, with one layer."""

    def __init__(self, plan: dict[str, Any], number: int) -> None:
        super().__init__()
        self.plan, self.number, self.weight = plan, number, nn.Parameter(torch.ones(1))
        self.batch, self.count = 0, 0
        layers = plan.get("layers", 0)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))) if layers else None

    def begin(self, batch: int) -> None:
        """Must be called before each batch."""
        self.batch, self.count = batch, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.layers is None:
            batch, micro_batch, self.count = self.batch, self.count, self.count + 1
            return Sleep.apply(
                x,
                self.weight,
                lambda direction: drawn_seconds(self.plan, batch, self.number, direction, micro_batch),
            )
        return self.layers((x * self.weight).view(-1, WIDTH)).view_as(x)


def begin(module: nn.Module, batch: int) -> None:
    """Calls `begin` of all stages in `module`."""
    for stage in module.modules():
        if isinstance(stage, Stage):
            stage.begin(batch)


def layers_for(unit_s: float, elements: int) -> tuple[int, float]:
    """The number of linear layers whose forward and backward of a micro-batch take about unit_s, and their seconds."""
    layer, took = nn.Linear(WIDTH, WIDTH), []
    for _ in range(5):
        x = torch.randn(elements // WIDTH, WIDTH, requires_grad=True)
        began = time.perf_counter()
        layer(x).sum().backward()
        took.append(time.perf_counter() - began)
    one = statistics.median(took[1:])
    count = max(1, math.floor(unit_s / one + 0.5))
    return count, count * one


# ---- a link that stalls ----

# During a batch, the messages of one rank wait for 50 ms at random times. The draws depend on the batch, so every side
# has the same stalls at the same times after its begin. The rank shapes its own end of the link, so it must be root in
# its network namespace.

STALLED_BPS = 8_000.0  # nearly zero


def shape(rate_bps: float, usual_bps: float) -> None:
    """Change the rate at which this rank sends. Burst and limit stay those of the usual rate."""
    burst = burst_bytes(usual_bps)
    room = round(usual_bps / 8 * QUEUE_S) + burst
    queue = ["rate", f"{round(rate_bps)}bit", "burst", f"{burst}b", "limit", f"{room}b"]
    subprocess.run(["tc", "qdisc", "change", "dev", DEVICE, "root", "tbf", *queue], check=True, timeout=10)


def wake(rank: int) -> None:
    """Sends one small packet, because packets that wait have a timer of the old rate until a new packet comes."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_packet:
        any_packet.sendto(b"", (f"{SUBNET}.{1 if rank else 2}", 9))


class _Stalls:
    """A thread that makes the stalls of one batch."""

    def __init__(self, link: str, batch: int, rank: int) -> None:
        self.count = 0
        self.error: Exception | None = None
        self._rate, self._batch, self._rank = parse_rate(link), batch, rank
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._stall()
        except Exception as error:  # reported by the code that joins this thread
            self.error = error

    def _stall(self) -> None:
        begin = time.monotonic()
        at = 0.0
        for gap in gaps(self._batch):
            at += gap
            if self._ended.wait(max(0.0, begin + at - time.monotonic())):
                return
            shape(STALLED_BPS, self._rate)
            time.sleep(STALL_S)
            shape(self._rate, self._rate)
            wake(self._rank)
            self.count += 1
            at += STALL_S


@contextlib.contextmanager
def stalling(plan: dict[str, Any], rank: int, batch: int) -> Iterator[None]:
    """Makes the link stall on the rank of plan["stalls"], {"rank", "link"}, and does nothing on other ranks. Raises
    RuntimeError if the link never stalled."""
    wanted = plan.get("stalls")
    if not wanted or wanted["rank"] != rank:
        yield
        return
    stalls = _Stalls(wanted["link"], batch, rank)
    try:
        yield
    finally:
        stalls.end()
    if stalls.error is not None or stalls.count == 0:
        raise RuntimeError(f"batch {batch}: the link of rank {rank} stalled {stalls.count} times") from stalls.error


# ---- measuring ----


def loss_of(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output.mean() - label.mean()) ** 2


def turns(sides: list[str], number: int) -> list[str]:
    """The order of the sides in a round. Each side comes first, and after each other side, equally often."""
    first = number % len(sides)
    turned = sides[first:] + sides[:first]
    return turned if number // len(sides) % 2 == 0 else turned[::-1]


def measure(
    rank: Rank,
    modules: dict[str, nn.Module],
    train: Callable[[str, int], torch.Tensor],
    stats: Callable[[], Any],
    unit_s: float,
) -> NoReturn:
    """Trains a batch with each side in turns, and leaves with the seconds of each. train: trains the batch of this
    number with a side, and returns its losses. stats: of Sluice's pipeline, after the last batch."""
    seconds: dict[str, list[float]] = {name: [] for name in modules}
    worst = 0.0
    for number in range(rank.plan["pairs"] + 1):  # the first does not count
        losses: dict[str, torch.Tensor] = {}

        def step(name: str, number: int = number, losses: dict[str, torch.Tensor] = losses) -> None:
            losses[name] = train(name, number)

        for name in turns(list(modules), number):
            begin(modules[name], number)
            with stalling(rank.plan, rank.number, number):
                took = seconds_of(functools.partial(step, name))
            if number > 0:
                seconds[name].append(took)
        worst = max([worst, *(float((losses["stock"] - each).abs().max()) for each in losses.values())])
        rank.report(done=number, of=rank.plan["pairs"])
    found = {f"{name}_s": each for name, each in seconds.items()} | {"policy": stats()["policy"], "unit_s": unit_s}
    rank.leave(found | {"largest_loss_difference": max(gather(worst))})
