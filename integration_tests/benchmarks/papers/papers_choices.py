# SPDX-License-Identifier: Apache-2.0
"""Lines of papers.py about selectors of the pair (n, S) and the cost of their choices: MPMoE-pb, MPMoE-pm, MPipeMoE.

- pb, profile-based [MPMoE IV-A]: tries every pair, n from 2 to 8 (Algorithm 1's scope) under each of S1 to S4. The
  result of a trial is the duration of the schedule in virtual time, so pb finds the best pair of that scope.
- pm, the performance model [MPMoE IV-B]: the pair with the shortest time by Fig. 8's phases and slowdown factors.
- MPipeMoE: n by Algorithm 1 of the pipeline without reuse, then S by eq. 10 at that n.

All selectors use the same machine: curves, start-up times, and the shares that determine the slowdown factors.
"""

import statistics
from collections.abc import Callable
from functools import partial

from sluice.planning.planner import Choice, Prediction, Workload

from integration_tests.benchmarks.papers.papers_cluster import (
    BATCHES,
    MODELS,
    STRATEGIES,
    Cluster,
    Prices,
    Row,
    best_reuse,
    each,
    pair,
    seconds,
    work,
)

SCOPE = tuple(range(2, 9))  # n that the papers' Algorithm 1 may take
GPUS = (8, 32, 64)
Selector = Callable[[Cluster, Workload], Choice]


def _least(prices: Prices, load: Workload, of: Callable[[Prediction], float], scope: tuple[int, ...] = SCOPE) -> Choice:
    pairs = [pair(n, policy) for n in scope for policy in STRATEGIES]
    return min(pairs, key=lambda one: of(prices.predict(load, one)))


def pb(cluster: Cluster, load: Workload) -> Choice:
    return _least(cluster.planner, load, lambda found: found.seconds)


def pm(cluster: Cluster, load: Workload) -> Choice:
    return _least(cluster.planner, load, lambda found: found.mpmoe)


def pm_without_factors(cluster: Cluster, load: Workload) -> Choice:
    """Fig. 8 as printed, without slowdown factors."""
    return _least(cluster.sequential, load, lambda found: found.mpmoe)


def mpipemoe(cluster: Cluster, load: Workload) -> Choice:
    n = min(SCOPE, key=partial(seconds, cluster.planner, load))
    return _least(cluster.planner, load, lambda found: found.mpipemoe, (n,))


def eq_10_alone(cluster: Cluster, load: Workload) -> Choice:
    """Eq. 10 chooses both n and S. The paper does not do this: eq. 10 has no start-up times that favour a small n."""
    return _least(cluster.planner, load, lambda found: found.mpipemoe)


SELECTORS: dict[str, Selector] = {
    "Fig. 8 (pm)": pm,
    "Fig. 8 without its factors": pm_without_factors,
    "MPipeMoE (Alg. 1, then eq. 10)": mpipemoe,
    "eq. 10 for n and S": eq_10_alone,
}


def taken(cluster: Cluster, load: Workload, choose: Selector) -> float:
    """Seconds of the chosen pair."""
    return cluster.planner.predict(load, choose(cluster, load)).seconds


def loads(*gpus: int) -> list[Workload]:
    return [work(model, batch, ranks) for model in MODELS for batch in BATCHES for ranks in gpus]


def _span(values: list[float], digits: int = 2) -> str:
    return f"{statistics.mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def regret(cluster: Cluster, choose: Selector) -> str:
    """Time of the chosen pair over the scope's best pair, minus 1: mean, 90th percentile and maximum, in percent."""
    gpus = [ranks for ranks in GPUS if ranks <= cluster.data["world_size"]] or [cluster.data["world_size"]]
    found = sorted(taken(cluster, load, choose) / taken(cluster, load, pb) - 1 for load in loads(*gpus))
    p90 = found[min(len(found) - 1, int(0.9 * len(found)))]
    return f"{100 * statistics.mean(found):.1f} % ({100 * p90:.1f}; {100 * found[-1]:.1f})"


def pm_over_pb(cluster: Cluster) -> str:
    return _span([taken(cluster, load, pm) / taken(cluster, load, pb) for load in loads(64)])


def speedups(cluster: Cluster, choose: Selector, baseline: Callable[[Cluster, Workload], float]) -> str:
    return _span([baseline(cluster, load) / taken(cluster, load, choose) for load in loads(64)])


def scaling(cluster: Cluster, choose: Selector) -> float:
    """Throughput of all servers over that of one server, with a fixed number of tokens per GPU."""
    ratios = [
        cluster.servers * taken(cluster, work(model, batch, 8), choose) / taken(cluster, work(model, batch, 64), choose)
        for model in MODELS
        for batch in BATCHES
    ]
    return statistics.mean(ratios)


def adaptive_bar(cluster: Cluster) -> str:
    """GPT-XL at 16k by GPUs: the best pair with reuse, each selector's time over that pair's, and the cost of reuse."""
    found = []
    for ranks in GPUS:
        load = work("GPT-XL", 16384, ranks)
        least, n, policy = best_reuse(cluster.planner, load)
        without = min(seconds(cluster.planner, load, n) for n in SCOPE)
        picks = {"pm": pm, "MPipeMoE": mpipemoe}
        words = [f"{name} {picks[name](cluster, load).policy}" for name in picks]
        words += [f"{name} x{taken(cluster, load, choose) / least:.2f}" for name, choose in picks.items()]
        found.append(f"{ranks}: {policy} n {n}, {', '.join(words)}, reuse x{least / without:.2f}")
    return "; ".join(found)


def best_by_batch(cluster: Cluster) -> str:
    """The best strategy of GPT-XL by number of GPUs and B."""
    return "; ".join(
        f"{ranks}: " + " ".join(best_reuse(cluster.planner, work("GPT-XL", batch, ranks))[2] for batch in BATCHES)
        for ranks in GPUS
    )


def rows(adira: dict[str, Cluster], valor: dict[str, Cluster], baselines: dict[str, Callable]) -> list[Row]:
    """baselines: seconds of "by destination", "unsplit" and "unsplit in f32"."""

    def over(name: str) -> Callable[[Cluster], str]:
        return lambda c: f"pb {speedups(c, pb, baselines[name])}, pm {speedups(c, pm, baselines[name])}"

    return [
        Row("pm over pb, time", "MPMoE Fig. 10", "1.07 (1.66 over 1.55)", each(adira, pm_over_pb)),
        Row("pb and pm over split by destination", "MPMoE Fig. 10", "pb 1.66, pm 1.55 (to 2.32)",
            each(adira, over("by destination"))),
        Row("pb and pm over unsplit, that without Tensor Cores", "MPMoE Fig. 10", "pb 2.34, pm 2.20",
            each(adira, over("unsplit in f32"))),
        Row("pb and pm over unsplit, both with Tensor Cores", "MPMoE Fig. 10", "not published",
            each(adira, over("unsplit"))),
        *(
            Row(f"regret: {name}", "MPMoE IV, MPipeMoE III-E", "not published",
                each({**adira, **valor}, partial(regret, choose=choose)))
            for name, choose in SELECTORS.items()
        ),
        Row("the adaptive bar, GPT-XL at 16k", "MPMoE Fig. 15, MPipeMoE Fig. 13", "as fast as the best strategy",
            each(adira, adaptive_bar)),
        Row("best strategy of GPT-XL at 4k, 8k, 16k, 32k by GPUs", "MPMoE Fig. 15, MPipeMoE Fig. 13",
            "hardly depends on B", each(adira, best_by_batch)),
        Row("throughput of 8 servers over one, pb and pm", "MPMoE Fig. 17", "pb 5.76, above pm",
            each(adira, lambda c: f"pb {scaling(c, pb):.2f}, pm {scaling(c, pm):.2f}")),
    ]  # fmt: skip
