# SPDX-License-Identifier: Apache-2.0
"""The papers' clusters, models and pairs (n, S), priced with the real schedules in virtual time, for papers.py.

Baselines: `unsplit` is n = 1 (FastMoE, PipeMoE(n=1)); `by destination` is FasterMoE's split, with one piece for each
server, a message for each peer and a fixed n; `fixed n`; `without reuse` is PipeMoE (n adaptive, everything kept).
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sluice.planning import machines
from sluice.planning.planner import Choice, Planner, Prediction, Workload
from sluice.restore import SETS

# MPipeMoE Table III: (M, H); 64 experts, K = 1 (section IV-E).
MODELS = {"GPT-S": (768, 3072), "BERT-L": (1024, 4096), "GPT-XL": (2048, 8192)}
BATCHES = (4096, 8192, 16384, 32768)  # B on each GPU
CHUNKS = (1, 2, 3, 4, 6, 8, 12, 16)
A100 = ("a100-8x8-1600g", "a100-8x8-200g")
# Assumed: the time of a message between two ranks, and the sustained part of the f32 rate outside Tensor Cores.
P2P_SECONDS, F32_SHARE = 1.5e-5, 0.87
FITTED_RATE = 6e13  # a fifth of the A100's peak: the only fitted number, see Cluster.slow_gemms
F32_PEAK = {"a100": 1.95e13, "v100": 1.57e13}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    source: str
    published: str
    simulated: dict[str, str]


class Prices:
    """A planner that caches predictions, because tables price the same pairs repeatedly."""

    def __init__(self, data: dict[str, Any]) -> None:
        self._planner = Planner(machines.Machine(data, {}))
        self._known: dict[tuple[Workload, Choice], Prediction] = {}

    def predict(self, load: Workload, choice: Choice) -> Prediction:
        key = load, choice
        if key not in self._known:
            self._known[key] = self._planner.predict(load, choice)
        return self._known[key]


class Cluster:
    """Planners of a profile, and of its variants without Tensor Cores and with FasterMoE's messages."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.data = machines.load(name).data
        self.planner = Prices(self.data)
        slow = copy.deepcopy(self.data)
        rate = F32_PEAK[name.partition("-")[0]] * F32_SHARE
        slow["gemm"]["f16"] = {"flops_per_second": rate, "half_rows": 32}
        self.no_tensor_cores = Prices(slow)
        fitted = copy.deepcopy(self.data)
        fitted["gemm"]["f16"] = {"flops_per_second": FITTED_RATE, "half_rows": 64}
        self.slow_gemms = Prices(fitted)
        # One piece for each server; a piece has a message for each peer on that server.
        self.by_destination = Prices(self._p2p(self.data))
        self.by_destination_no_tensor_cores = Prices(self._p2p(slow))

    @staticmethod
    def _p2p(data: dict[str, Any]) -> dict[str, Any]:
        changed = copy.deepcopy(data)
        servers = data["world_size"] // data["ranks_per_node"]
        changed["exchange"]["per_peer_seconds"] = P2P_SECONDS / servers
        return changed

    @property
    def servers(self) -> int:
        return self.data["world_size"] // self.data["ranks_per_node"]

    @cached_property
    def sequential(self) -> Prices:
        """The cluster without interference: lanes do not slow each other down."""
        return Prices({**self.data, "share": []})

    @cached_property
    def sequential_by_destination(self) -> Prices:
        return Prices({**self._p2p(self.data), "share": []})


def each(clusters: dict[str, Cluster], figure: Callable[[Cluster], str]) -> dict[str, str]:
    """The simulated values of a line, by cluster."""
    return {name: figure(cluster) for name, cluster in clusters.items()}


def work(model: str, batch: int, ranks: int = 64) -> Workload:
    """One layer of a paper's model."""
    return Workload(*MODELS[model], batch, 64, 1, ranks, "f16")


def seconds(planner: Prices, load_: Workload, n: int, policy: str = "none") -> float:
    """Seconds of a step with the faster of the two weight-gradient modes."""
    return min(planner.predict(load_, Choice(n, *SETS[policy], mode)).seconds for mode in ("deferred", "per_chunk"))


def best(planner: Prices, load_: Workload, policy: str = "none") -> tuple[float, int]:
    """(seconds, n) of the best n."""
    return min((seconds(planner, load_, n, policy), n) for n in CHUNKS)


STRATEGIES = ("S1", "S2", "S3", "S4")


def pair(n: int, policy: str) -> Choice:
    """A pair (n, S) with reuse."""
    return Choice(n, *SETS[policy], "per_chunk")


def best_reuse(planner: Prices, load_: Workload) -> tuple[float, int, str]:
    """(seconds, n, strategy) of the best pair with reuse: n and S chosen together, as in the papers."""
    pairs = ((n, policy) for n in CHUNKS if n > 1 for policy in STRATEGIES)
    return min((planner.predict(load_, pair(n, policy)).seconds, n, policy) for n, policy in pairs)
