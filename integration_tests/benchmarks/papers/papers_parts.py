# SPDX-License-Identifier: Apache-2.0
"""Lines of papers.py about parts of a step: bytes by kind, interference, baselines, exchanges by n, partition."""

import statistics
from collections.abc import Callable

from sluice._library import load as library
from sluice.planning.interference import alphas, lines
from sluice.planning.planner import Choice, Workload

from integration_tests.benchmarks.papers.papers_cluster import (
    BATCHES,
    MODELS,
    Cluster,
    Prices,
    Row,
    best,
    best_reuse,
    each,
    seconds,
    work,
)

FIG_2 = (256, 1024, 4096, 16384)  # some of the numbers of tokens in the figure
KEEP = ("keep", "keep")


# ---- bytes ---------------------------------------------------------------------------------------------------------


def shares_of_bytes(model: str) -> str:
    """The share of activations and temporary buffers in all bytes without a pipeline, from eq. 1 to 3."""
    out = library().ffi.new("sluice_paper_footprint_t *")
    found = []
    for batch in FIG_2:
        library().lib.sluice_paper_footprint(batch, *MODELS[model], 64, 1, out)
        part = out.activations + out.temporaries
        found.append(f"{batch}: {100 * part / (part + out.states):.0f} %")
    return ", ".join(found)


def point(name: str, time: float, elements: float) -> str:
    return f"{name} {1e3 * time:.1f} ms {elements:.2f}"


def fig_11(cluster: Cluster, slots: Callable[[str, int, int, str], float]) -> str:
    """GPT-XL at 16k: milliseconds of a step, and bytes over those of FastMoE."""
    B, (M, H) = 16384, MODELS["GPT-XL"]
    load = work("GPT-XL", B)
    states, pipe = 4.0 * (4 * (64 * M + 2 * H * M)), 4.0 * 2 * (4 * B * M + B * H)
    fastmoe = states + 4.0 * (4 * B * M + B * H + B * M + B * H)
    chosen, n, policy = best_reuse(cluster.planner, load)
    lean = states + 4.0 * 4 * B * M + slots("GPT-XL", B, n, policy)
    return ", ".join(
        (
            point("FastMoE", seconds(cluster.planner, load, 1), 1),
            point("FasterMoE", seconds(cluster.by_destination, load, cluster.servers), (states + pipe) / fastmoe),
            point("PipeMoE(n=4)", seconds(cluster.planner, load, 4), (states + pipe) / fastmoe),
            point("PipeMoE", best(cluster.planner, load)[0], (states + pipe) / fastmoe),
            point("MPipeMoE", chosen, lean / fastmoe),
        )
    )


# ---- seconds -------------------------------------------------------------------------------------------------------


def most(cluster: Cluster, baseline: Callable[[Cluster, Workload], float]) -> str:
    """The time of the baseline over that of the best pair with reuse: mean and maximum over models and batches."""
    ratios = [
        baseline(cluster, load) / best_reuse(cluster.planner, load)[0]
        for load in (work(model, batch) for model in MODELS for batch in BATCHES)
    ]
    return f"{statistics.mean(ratios):.2f} (to {max(ratios):.2f})"


def interference(cluster: Cluster) -> str:
    """The profile's alpha(y, x) and alpha(y, all), with the rule that each pair must satisfy."""
    return "; ".join(lines(alphas(cluster.data)))


def exchanges(cluster: Cluster) -> str:
    """GPT-XL at 16k: time of a forward's dispatches and combines by n, and in FasterMoE's pieces."""
    load = work("GPT-XL", 16384, cluster.data["world_size"])

    def comm(prices: Prices, n: int) -> str:
        return f"{1e3 * prices.predict(load, Choice(n, *KEEP, 'per_chunk')).forward_busy['comm']:.1f}"

    by_n = ", ".join(f"n {n}: {comm(cluster.sequential, n)}" for n in (1, 2, 4, 8))
    return f"{by_n}; FasterMoE: {comm(cluster.sequential_by_destination, cluster.servers)} ms"


def _sequential(cluster: Cluster, load: Workload, n: int) -> float:
    """Seconds of computation and communication in sequence."""
    found = cluster.sequential.predict(load, Choice(n, *KEEP, "per_chunk"))
    return found.busy("compute") + found.busy("comm")


def of_six(cluster: Cluster, other: Callable[[Cluster, Workload], float]) -> str:
    """`other` over computation and communication of n = 6 in sequence, minus 1."""
    found = []
    for model in ("BERT-L", "GPT-XL"):
        load = work(model, 16384, cluster.data["world_size"])
        found.append(f"{model} {100 * (other(cluster, load) / _sequential(cluster, load, 6) - 1):+.0f} %")
    return ", ".join(found)


def partition(cluster: Cluster) -> str:
    """Time of n = 6 over n = 1, both sequential."""
    found = []
    for model in ("BERT-L", "GPT-XL"):
        load = work(model, 16384, cluster.data["world_size"])
        found.append(f"{model} {100 * (_sequential(cluster, load, 6) / _sequential(cluster, load, 1) - 1):+.0f} %")
    return ", ".join(found)


def rows(
    adira: dict[str, Cluster],
    valor: dict[str, Cluster],
    baselines: dict[str, Callable[[Cluster, Workload], float]],
    selectors: dict[str, Callable[[Cluster, Workload], float]],
    slots: Callable[[str, int, int, str], float],
) -> list[Row]:
    """baselines and selectors: seconds of each; slots: bytes of a pass (model, B, n, strategy)."""
    return [
        Row("activations and buffers of all bytes, by tokens", "MPipeMoE Fig. 2, MPMoE Fig. 2",
            "the major part as tokens grow", {model: shares_of_bytes(model) for model in MODELS}),
        Row("slowdown factors", "MPipeMoE Fig. 3, MPMoE Fig. 3",
            "comm during copies loses most, computation next to nothing; above 0.5",
            each({**adira, **valor}, interference)),
        Row("unsplit over n and S chosen, both with Tensor Cores", "MPipeMoE Fig. 9", "to 3.1",
            each(adira, lambda c: most(c, baselines["unsplit"]))),
        Row("unsplit over n and S chosen, that without Tensor Cores", "MPipeMoE Fig. 9", "to 3.1",
            each(adira, lambda c: most(c, baselines["unsplit in f32"]))),
        Row("by destination over n and S chosen, that without Tensor Cores", "MPipeMoE Fig. 9", "to 2.8",
            each(adira, lambda c: most(c, baselines["by destination in f32"]))),
        Row("time and bytes, GPT-XL at 16k", "MPipeMoE Fig. 11",
            "FastMoE, FasterMoE, PipeMoE(n=4), PipeMoE: less time each; MPipeMoE: least bytes, second to PipeMoE",
            each(adira, lambda c: fig_11(c, slots))),
        Row("dispatch and recovery of a forward by n, GPT-XL at 16k", "MPMoE Fig. 13",
            "grows with n; FasterMoE above", each({**adira, **valor}, exchanges)),
        Row("n = 6 over n = 1, one after the other", "MPMoE Fig. 16", "BERT-L +12 %, GPT-XL +4 %",
            each(valor, partition)),
        Row("pb over n = 6 one after the other", "MPMoE Fig. 16", "BERT-L -30 %, GPT-XL -23 %",
            each(valor, lambda c: of_six(c, selectors["pb"]))),
        Row("pm over n = 6 one after the other", "MPMoE Fig. 16", "BERT-L -27 %, GPT-XL -22 %",
            each(valor, lambda c: of_six(c, selectors["pm"]))),
    ]  # fmt: skip
