# SPDX-License-Identifier: Apache-2.0
"""Ranks of live.py: DeepSpeed engines with sleeping layers, some of which move between stages."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from sluice.adapters.deepspeed.pipeline import live_layers, moving_layers
from sluice.adapters.deepspeed.pipeline.live_layers import LiveLayers
from sluice.adapters.torch import Migration
from sluice.planning.layer_moves import (
    LearnedRates,
    Path,
    Steps,
    best_parts,
    busiest_bytes_of,
    priced,
    slowest_stage,
    steps_to,
)
from torch import nn

from integration_tests.benchmarks.live import live_changes
from integration_tests.benchmarks.measuring import launch
from integration_tests.benchmarks.measuring.rank import Rank, gather, seconds_of
from integration_tests.benchmarks.stages.stages_rank import engine_of
from integration_tests.benchmarks.stages.stages_work import Sleep

# ---- work: layers that sleep, with weights that matter only when they are sent ----


class Clock:
    """The forward time of each layer of this process."""

    seconds: list[float] = []


class Layer(nn.Module):
    """Sleeps for the time of its number. elements: the size of its weight, for which AdamW keeps two moments; frozen:
    bytes that only matter when they are sent."""

    def __init__(self, number: int, elements: int, frozen: int = 0) -> None:
        super().__init__()
        self.number, self.weight = number, nn.Parameter(torch.ones(elements))
        if frozen:
            self.frozen = nn.Parameter(torch.ones(frozen, dtype=torch.uint8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(x, self.weight, self.seconds)

    def seconds(self, direction: str) -> float:
        """A backward takes twice as long as a forward."""
        return Clock.seconds[self.number] * (1 if direction == "forward" else 2)


def layers_of(elements: Sequence[int], frozen: int = 0) -> list[LayerSpec]:
    """A layer for each entry of `elements`."""
    return [LayerSpec(Layer, number, count, frozen) for number, count in enumerate(elements)]


def data(micro_batches: int, elements: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The micro-batches of one batch."""
    for number in range(micro_batches):
        yield torch.full((1, elements), 1.0), torch.tensor([float(number)])


# ---- cells ----


class Trainer:
    """One engine. key: the "pipeline" section of its config; frozen: bytes of each layer in addition to its weight."""

    def __init__(self, plan: dict[str, Any], elements: list[int], key: dict[str, Any], frozen: int = 0) -> None:
        self.plan = plan
        self.engine = engine_of(layers_of(elements, frozen), plan, key, lr=1e-6)

    @property
    def parts(self) -> list[int]:
        return [int(bound) for bound in self.engine.module.parts]

    def train(self) -> None:
        """Trains one batch."""
        self.engine.train_batch(data(self.plan["micro_batches"], self.plan["elements"]))

    def stats(self) -> dict[str, Any]:
        return self.engine.sluice.pipeline.stats()

    def end(self) -> None:
        self.engine.sluice.unswap()


def stall(plan: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a step without a move, with a layer that moves before it, and with one that moves during it, in turns.

    The moving layer does not sleep, so steps without a move take the same time wherever the layer is.
    """
    Clock.seconds = [plan["forward_s"]] * 2 + [0.0] + [plan["forward_s"]] * 2
    sides = ("still", "drained", "live")
    trainer = Trainer(plan, [16, 16, plan["weights"], 16, 16], {"policy": "1f1b_hint"})
    seconds: dict[str, list[float]] = {side: [] for side in sides}

    def step(side: str) -> None:
        if side != "still":
            parts = [0, 5 - trainer.parts[1], 5]  # the boundary alternates between 2 and 3
            trainer.engine.sluice.move_layers(parts, live=side == "live")
        trainer.train()

    for _ in range(3):  # creates the moments and lets the engine choose its limits
        trainer.train()
    for number in range(plan["pairs"] + 1):
        for side in sides[number % 3 :] + sides[: number % 3]:
            took = seconds_of(lambda side=side: step(side))
            if number > 0:  # the first round makes connections
                seconds[side].append(took)
        report(number, plan["pairs"], "stall")
    found = {"seconds": seconds, "live": trainer.stats()["live"], "in_flight": trainer.stats()["in_flight"]}
    trainer.end()
    return found


def latencies(plan: dict[str, Any]) -> dict[str, Any]:
    """Seconds from the end of a forward on the first stage to its begin on the second stage, which waits for it: while
    nothing moves, while moving state shares the link, and while moving state gives way (the default)."""
    Clock.seconds = [plan["forward_s"] / 2, plan["forward_s"] / 2, 0.0, 0.0, 0.0]
    trainer = Trainer(plan, [16, 16, plan["weights"], 16, 16], {"policy": "1f1b_hint"})
    arrivals: list[int] = []
    original = LiveLayers._is_there

    def is_there(self: Any, trip: Any) -> bool:
        found = original(self, trip)
        if found:
            arrivals.append(time.monotonic_ns())
        return found

    LiveLayers._is_there = is_there  # type: ignore[method-assign]
    gives_way = {"still": True, "sharing": False, "giving way": True}
    found: dict[str, list[float]] = {name: [] for name in gives_way}
    for _ in range(3):
        trainer.train()
    for number in range(plan["pairs"] + 1):
        for name, gives in gives_way.items():
            arrivals.clear()
            if name != "still":
                trainer.engine.sluice.pipeline.live.close()  # the next move creates a new Migration
                live_layers.Migration = partial(Migration, gives_way=gives)  # type: ignore[assignment,misc]
                trainer.engine.sluice.move_layers([0, 2, 5], live=True)
            trainer.train()
            taken = _latencies(trainer, arrivals)
            if number > 0:
                found[name] += taken
            if name != "still":
                trainer.engine.sluice.move_layers([0, 3, 5])
                trainer.train()
        report(number, plan["pairs"], "latencies")
    LiveLayers._is_there = original  # type: ignore[method-assign]
    live_layers.Migration = Migration  # type: ignore[misc]
    trainer.end()
    return found


def _latencies(trainer: Trainer, arrivals: list[int]) -> list[float]:
    """Latencies of the last batch's activations that were sent before the state arrived. Both ranks use one clock."""
    events = [e for e in trainer.engine.sluice.pipeline.pipeline.timeline() if e["op"] == "forward"]
    own = {e["chunk"]: (e["begin_ns"], e["end_ns"]) for e in events}
    said: list[Any] = [None, None]
    dist.all_gather_object(said, (own, arrivals[0] if arrivals else None))
    (first, _), (second, arrival) = said
    return [
        (second[chunk][0] - first[chunk][1]) / 1e9
        for chunk in sorted(first)
        if arrival is None or first[chunk][1] < arrival
    ]


def decided(plan: dict[str, Any]) -> dict[str, Any]:
    """Trains layers whose times change, with stages that move layers automatically and with stages that do not."""
    layers, batches = plan["layers"], plan["batches"]
    Clock.seconds = [plan["base_s"]] * layers
    every = list(live_changes.changes(layers, plan["base_s"]))[: plan["changes"]]
    still = Trainer(plan, [plan["weights"]] * layers, {"policy": "1f1b_hint"})
    uniform = still.parts
    still.train()
    static: list[float] = []
    ideal: list[float] = []
    for number, seconds in enumerate(every):
        Clock.seconds = seconds
        static.append(statistics.median(seconds_of(still.train) for _ in range(plan["static_batches"])))
        still.engine.sluice.move_layers(list(best_parts(seconds, uniform, [1] * layers)))
        ideal.append(statistics.median(seconds_of(still.train) for _ in range(plan["static_batches"])))
        still.engine.sluice.move_layers(uniform)
        report(number, len(every), "static and ideal")
    still.end()
    own = Trainer(plan, [plan["weights"]] * layers, {"policy": "1f1b_hint", "plan": "adaptive"})
    Clock.seconds = [plan["base_s"]] * layers
    for _ in range(3):
        own.train()
    took: list[list[float]] = []
    off: list[list[float]] = []
    for number, seconds in enumerate(every):
        Clock.seconds = seconds
        least = slowest_stage(seconds, best_parts(seconds, uniform, [1] * layers))
        took.append([])
        off.append([])
        for _ in range(batches):
            took[-1].append(seconds_of(own.train))
            off[-1].append(slowest_stage(seconds, own.parts) / least - 1)  # with the partition after the batch
        report(number, len(every), "adaptive")
    moves, live = own.stats()["layers"]["moves"], own.stats()["live"]
    in_noise = noise(plan, own, layers)
    own.end()
    return {"took": took, "off": off, "static": static, "ideal": ideal, "moves": moves, "live": live, **in_noise}


def noise(plan: dict[str, Any], own: Trainer, layers: int) -> dict[str, Any]:
    """Counts moves while the times of equal layers vary by up to a tenth per batch, after 8 batches to settle."""
    even = [plan["base_s"] / 2] * layers
    Clock.seconds = even
    for _ in range(8):
        own.train()
    before = own.stats()["layers"]["moves"]
    for number in range(plan["noise_batches"]):
        Clock.seconds = live_changes.noisy(even, number, 0.1)
        own.train()
        report(number, plan["noise_batches"], "noise")
    return {"noise_moves": own.stats()["layers"]["moves"] - before, "noise_batches": plan["noise_batches"]}


def ways(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Makes moves of layers of several sizes in both ways, in turns, with equally many batches, and says which way the
    price would have chosen. The rates in the price are those of the move before, as with "plan": "adaptive"."""
    layers, found = plan["layers"], []
    for mib in plan["sizes_mib"]:
        sizes = [mib << 20] * layers
        trainer = Trainer(plan, [16] * layers, {"policy": "1f1b_hint"}, mib << 20)
        Clock.seconds = [plan["base_s"]] * layers
        for _ in range(3):
            trainer.train()
        learned, number = LearnedRates(1e8, fades=False), -1  # each move is made in both ways
        for forwards in list(live_changes.changes(layers, plan["base_s"]))[: plan["changes"] + 1]:
            Clock.seconds, seconds, parts = forwards, [3 * each for each in forwards], tuple(trainer.parts)
            target = best_parts(seconds, parts, sizes)
            if target == parts:
                continue
            number += 1
            trainer.train()
            rates = learned.rates
            way = priced(parts, target, seconds, sizes, rates, plan["micro_batches"])
            nearest = (parts, *steps_to(parts, target, seconds))
            path = Steps(seconds, sizes, rates, plan["micro_batches"], None).cheaper(nearest)[1:]
            took: dict[str, float] = {}
            for side in ("live", "drained") if number % 2 else ("drained", "live"):
                if tuple(trainer.parts) != parts:
                    moving_layers.move(trainer.engine, parts)
                costs: list[tuple[float, float]] = []  # of this rank's moves: seconds, and those or bytes of transfers
                took[side] = seconds_of(partial(_moved, trainer, target, path, side == "live", costs))
                assert tuple(trainer.parts) == target
                # Of the slowest rank, by step: seconds, and those or bytes of transfers.
                slowest = [tuple(max(each) for each in zip(*step)) for step in zip(*gather(costs))]
                if side == "live":
                    for (own, late), old, new in zip(slowest, (parts, *path), path):
                        learned.stepped(busiest_bytes_of(old, new, sizes), own, late / rates.link)
                else:
                    learned.drained(busiest_bytes_of(parts, target, sizes), *slowest[0])
            if number > 0:  # the first move learns rates
                priced_s = {"live_s": way.live_s, "drained_s": way.drained_s}
                found.append({"mib": mib, "is_live": bool(way.steps), "steps": len(path), **took, **priced_s})
            report(len(found), len(plan["sizes_mib"]) * plan["changes"], "ways")
        trainer.end()
    return found


def _moved(
    trainer: Trainer, target: tuple[int, ...], path: Path, is_live: bool, costs: list[tuple[float, float]]
) -> None:
    """Moves layers to the target and trains as many batches as the path has steps."""
    if not is_live:
        begun = time.perf_counter()
        travel_s = moving_layers.move(trainer.engine, target).travel_s
        costs.append((time.perf_counter() - begun, travel_s))
    for parts in path:
        if is_live:
            trainer.engine.sluice.move_layers(list(parts), live=True)
        trainer.train()
        if is_live:
            live = trainer.engine.sluice.pipeline.live
            costs.append((live.exposed_s, live.late_bytes))


def report(done: int, of: int, name: str) -> None:
    if dist.get_rank() == 0:
        launch.report(done=done, of=of, name=name)


CELLS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "stall": stall,
    "latencies": latencies,
    "decided": decided,
    "ways": ways,
}


def main() -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    rank = Rank()
    rank.leave({name: CELLS[name]({**rank.plan, **cell}) for name, cell in rank.plan["cells"].items()})


if __name__ == "__main__":
    main()
