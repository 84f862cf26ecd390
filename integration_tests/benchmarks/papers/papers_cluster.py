# SPDX-License-Identifier: Apache-2.0
"""The papers' clusters, models and pairs (n, S), priced with the real schedules in virtual time, for papers.py.

Baselines: `unsplit` is n = 1 (FastMoE, PipeMoE(n=1)); `by destination` is FasterMoE's split, with one piece for each
server, a message for each peer and a fixed n; `fixed n`; `without reuse` is PipeMoE (n adaptive, everything kept).

Selectors of the pair:

- pb, profile-based [MPMoE IV-A]: tries every pair, n from 2 to 8 (Algorithm 1's scope) under each of S1 to S4. The
  result of a trial is the duration of the schedule in virtual time, so pb finds the best pair of that scope.
- pm, the performance model [MPMoE IV-B]: the pair with the shortest time by Fig. 8's phases and slowdown factors.
- MPipeMoE: n by Algorithm 1 of the pipeline without reuse, then S by eq. 10 at that n.

All selectors use the same machine: curves, start-up times, and the shares that determine the slowdown factors.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

from sluice.planning import machines
from sluice.planning.planner import Choice, Planner, Prediction, Workload
from sluice.restore import SETS

# MPipeMoE Table III: (M, H); 64 experts, K = 1 (section IV-E).
MODELS = {"GPT-S": (768, 3072), "BERT-L": (1024, 4096), "GPT-XL": (2048, 8192)}
BATCHES = (4096, 8192, 16384, 32768)  # B on each GPU
CHUNKS = (1, 2, 3, 4, 6, 8, 12, 16)
SCOPE = tuple(range(2, 9))  # n that the papers' Algorithm 1 may take
GPUS = (8, 32, 64)
STRATEGIES = ("S1", "S2", "S3", "S4")
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
        self.predict: Callable[[Workload, Choice], Prediction] = cache(Planner(machines.Machine(data, {})).predict)


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


def loads(*gpus: int) -> list[Workload]:
    return [work(model, batch, ranks) for model in MODELS for batch in BATCHES for ranks in gpus]


def seconds(planner: Prices, load_: Workload, n: int, policy: str = "none") -> float:
    """Seconds of a step with the faster of the two weight-gradient modes."""
    return min(planner.predict(load_, Choice(n, *SETS[policy], mode)).seconds for mode in ("deferred", "per_chunk"))


def best(planner: Prices, load_: Workload, policy: str = "none") -> tuple[float, int]:
    """(seconds, n) of the best n."""
    return min((seconds(planner, load_, n, policy), n) for n in CHUNKS)


def pair(n: int, policy: str) -> Choice:
    """A pair (n, S) with reuse."""
    return Choice(n, *SETS[policy], "per_chunk")


def best_reuse(planner: Prices, load_: Workload) -> tuple[float, int, str]:
    """(seconds, n, strategy) of the best pair with reuse: n and S chosen together, as in the papers."""
    pairs = ((n, policy) for n in CHUNKS if n > 1 for policy in STRATEGIES)
    return min((planner.predict(load_, pair(n, policy)).seconds, n, policy) for n, policy in pairs)


# ---- selectors ----

Selector = Callable[[Cluster, Workload], Choice]
Seconds = Callable[[Cluster, Workload], float]


def by(choose: Selector) -> Seconds:
    """The time of the chosen pair."""
    return lambda cluster, load: cluster.planner.predict(load, choose(cluster, load)).seconds


def _least(prices: Prices, load: Workload, of: str, scope: tuple[int, ...] = SCOPE) -> Choice:
    pairs = [pair(n, policy) for n in scope for policy in STRATEGIES]
    return min(pairs, key=lambda one: getattr(prices.predict(load, one), of))


def pb(cluster: Cluster, load: Workload) -> Choice:
    return _least(cluster.planner, load, "seconds")


def pm(cluster: Cluster, load: Workload) -> Choice:
    return _least(cluster.planner, load, "mpmoe")


def mpipemoe(cluster: Cluster, load: Workload) -> Choice:
    n = min(SCOPE, key=partial(seconds, cluster.planner, load))
    return _least(cluster.planner, load, "mpipemoe", (n,))


SELECTORS: dict[str, Selector] = {
    "Fig. 8 (pm)": pm,
    "Fig. 8 without its factors": lambda cluster, load: _least(cluster.sequential, load, "mpmoe"),
    "MPipeMoE (Alg. 1, then eq. 10)": mpipemoe,
    # The paper does not do this: eq. 10 has no start-up times that favour a small n.
    "eq. 10 for n and S": lambda cluster, load: _least(cluster.planner, load, "mpipemoe"),
}
