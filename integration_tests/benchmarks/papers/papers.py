# SPDX-License-Identifier: Apache-2.0
"""The papers' own figures, published and simulated, on profiles of the papers' clusters.

Sluice's real schedules run in virtual time. The profiles (python_plugin/sluice/planning/profiles) contain datasheet
rates with assumed efficiencies, which are not fitted, except for one number in one line. The two papers describe the
links of the A100 cluster differently (200 Gb/s a server, 1,600 Gb/s a server), so both readings are simulated.

papers_cluster.py has the clusters, their prices and the selectors of the pair (n, S); papers_myelin.py has the lines of
Myelin (AxoNN).
"""

import copy
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

from sluice._library import load as library
from sluice.planning import machines
from sluice.planning.planner import Choice, Planner, Workload
from sluice.planning.tune_command import alphas, lines_of_alphas
from sluice.restore import SETS

from integration_tests.benchmarks.measuring.bench import Bench, Option
from integration_tests.benchmarks.papers import papers_myelin
from integration_tests.benchmarks.papers.papers_cluster import (
    A100,
    BATCHES,
    GPUS,
    MODELS,
    SCOPE,
    SELECTORS,
    STRATEGIES,
    Cluster,
    Prices,
    Row,
    Seconds,
    best,
    best_reuse,
    by,
    each,
    loads,
    mpipemoe,
    pb,
    pm,
    seconds,
    work,
)

FIG_2 = (256, 1024, 4096, 16384)  # some of the numbers of tokens in the figure


# ---- sides: seconds of a workload on a cluster ----


def fixed(n: int) -> Seconds:
    """Everything kept in n chunks. n 1: unsplit (FastMoE, PipeMoE(n=1))."""
    return lambda cluster, one: seconds(cluster.planner, one, n)


def unsplit_slow(cluster: Cluster, one: Workload) -> float:
    return seconds(cluster.no_tensor_cores, one, 1)


def destination(cluster: Cluster, one: Workload) -> float:
    return seconds(cluster.by_destination, one, cluster.servers)


def destination_slow(cluster: Cluster, one: Workload) -> float:
    return seconds(cluster.by_destination_no_tensor_cores, one, cluster.servers)


def pipemoe(cluster: Cluster, one: Workload) -> float:
    """Everything kept, the best n."""
    return best(cluster.planner, one)[0]


def adaptive(cluster: Cluster, one: Workload) -> float:
    """MPMoE: n and one of S1 to S4, chosen together."""
    return best_reuse(cluster.planner, one)[0]


def sequential(n: int) -> Seconds:
    """Computation and communication of n chunks in sequence."""

    def total(cluster: Cluster, one: Workload) -> float:
        found = cluster.sequential.predict(one, Choice(n, "keep", "keep", "per_chunk"))
        return found.busy("compute") + found.busy("comm")

    return total


# ---- times over models and batches ----


def ratios(cluster: Cluster, top: Seconds, bottom: Seconds) -> list[float]:
    return [top(cluster, load) / bottom(cluster, load) for load in loads(64)]


def span(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def over(top: Seconds, bottom: Seconds) -> Callable[[Cluster], str]:
    """Mean, minimum and maximum of the ratio of times."""
    return lambda cluster: span(ratios(cluster, top, bottom))


def both_over(baseline: Seconds) -> Callable[[Cluster], str]:
    return lambda c: f"pb {over(baseline, by(pb))(c)}, pm {over(baseline, by(pm))(c)}"


def most(baseline: Seconds) -> Callable[[Cluster], str]:
    """The time of the baseline over that of the best pair with reuse: mean and maximum."""

    def told(cluster: Cluster) -> str:
        found = ratios(cluster, baseline, adaptive)
        return f"{statistics.mean(found):.2f} (to {max(found):.2f})"

    return told


def scaling(cluster: Cluster, chosen: Seconds) -> float:
    """Throughput of all servers over that of one server, with a fixed number of tokens per GPU."""
    pairs = ((work(model, batch, 8), work(model, batch, 64)) for model in MODELS for batch in BATCHES)
    return statistics.mean(cluster.servers * chosen(cluster, one) / chosen(cluster, all_) for one, all_ in pairs)


def scaled(chosen: Seconds) -> Callable[[Cluster], str]:
    return lambda c: f"{scaling(c, chosen):.2f} x ({100 * scaling(c, chosen) / 8:.0f} %)"


def regret(cluster: Cluster, name: str) -> str:
    """Time of the chosen pair over the scope's best pair, minus 1: mean, 90th percentile and maximum, in percent."""
    gpus = [ranks for ranks in GPUS if ranks <= cluster.data["world_size"]] or [cluster.data["world_size"]]
    found = sorted(by(SELECTORS[name])(cluster, load) / by(pb)(cluster, load) - 1 for load in loads(*gpus))
    p90 = found[min(len(found) - 1, int(0.9 * len(found)))]
    return f"{100 * statistics.mean(found):.1f} % ({100 * p90:.1f}; {100 * found[-1]:.1f})"


# ---- single workloads ----


def best_chunks(cluster: Cluster) -> str:
    """Best n of GPT-XL by B, among the n of the paper's figure."""
    found = []
    for batch in (4096, 6144, 8192, 12288, 16384, 22528, 24576, 32768, 65536):
        one = work("GPT-XL", batch)
        n = min((seconds(cluster.planner, one, n), n) for n in (1, 2, 4, 8))[1]
        found.append(f"{batch // 1024}k:{n}")
    return " ".join(found)


def small_batch(cluster: Cluster) -> str:
    """The speed-up of the best n > 1 over n = 1 at the smallest workload."""
    one = work("GPT-S", 4096)
    pipelined = min(seconds(cluster.planner, one, n) for n in (2, 4, 8))
    return f"{seconds(cluster.planner, one, 1) / pipelined:.2f} x of n = 1"


def strategies(planner: Prices) -> str:
    """S1 to S4 in order of time for GPT-XL at 16k, for each number of GPUs."""
    found = []
    for ranks in GPUS:
        one = work("GPT-XL", 16384, ranks)
        order = sorted((best(planner, one, policy)[0], policy) for policy in STRATEGIES)
        found.append(f"{ranks}: " + " ".join(f"{policy} {1e3 * time:.1f}" for time, policy in order))
    return "; ".join(found) + " ms"


def adaptive_bar(cluster: Cluster) -> str:
    """GPT-XL at 16k by GPUs: the best pair with reuse, each selector's time over that pair's, and the cost of reuse."""
    found = []
    for ranks in GPUS:
        load = work("GPT-XL", 16384, ranks)
        least, n, policy = best_reuse(cluster.planner, load)
        without = min(seconds(cluster.planner, load, n) for n in SCOPE)
        picks = {"pm": pm, "MPipeMoE": mpipemoe}
        words = [f"{name} {choose(cluster, load).policy}" for name, choose in picks.items()]
        words += [f"{name} x{by(choose)(cluster, load) / least:.2f}" for name, choose in picks.items()]
        found.append(f"{ranks}: {policy} n {n}, {', '.join(words)}, reuse x{least / without:.2f}")
    return "; ".join(found)


def best_by_batch(cluster: Cluster) -> str:
    """The best strategy of GPT-XL by number of GPUs and B."""
    return "; ".join(
        f"{ranks}: " + " ".join(best_reuse(cluster.planner, work("GPT-XL", batch, ranks))[2] for batch in BATCHES)
        for ranks in GPUS
    )


def interference(cluster: Cluster) -> str:
    """The profile's alpha(y, x) and alpha(y, all), with the rule that each pair must satisfy."""
    return "; ".join(lines_of_alphas(alphas(cluster.data)))


def exchanges(cluster: Cluster) -> str:
    """GPT-XL at 16k: time of a forward's dispatches and combines by n, and in FasterMoE's pieces."""
    load = work("GPT-XL", 16384, cluster.data["world_size"])

    def comm(prices: Prices, n: int) -> str:
        return f"{1e3 * prices.predict(load, Choice(n, 'keep', 'keep', 'per_chunk')).forward_busy['comm']:.1f}"

    by_n = ", ".join(f"n {n}: {comm(cluster.sequential, n)}" for n in (1, 2, 4, 8))
    return f"{by_n}; FasterMoE: {comm(cluster.sequential_by_destination, cluster.servers)} ms"


# ---- Fig. 16 of MPMoE: two models at 16k on all GPUs of a cluster ----


def _of_two(cluster: Cluster, told: Callable[[Workload], str], separator: str = ", ") -> str:
    ranks = cluster.data["world_size"]
    return separator.join(f"{model} {told(work(model, 16384, ranks))}" for model in ("BERT-L", "GPT-XL"))


def of_ideal(cluster: Cluster) -> str:
    """max(communication, computation) of a sequential n = 6 over the best of S1 to S4."""

    def told(one: Workload) -> str:
        six = cluster.sequential.predict(one, Choice(6, "keep", "keep", "per_chunk"))
        return f"{100 * max(six.busy('compute'), six.busy('comm')) / adaptive(cluster, one):.0f} %"

    return _of_two(cluster, told)


def tensor_cores(cluster: Cluster) -> str:
    """The reduction of computation, and of the unsplit step, by Tensor Cores."""

    def told(one: Workload) -> str:
        choice = Choice(1, "keep", "keep", "deferred")
        fast, slow = (planner.predict(one, choice) for planner in (cluster.planner, cluster.no_tensor_cores))
        parts = 1 - fast.busy("compute") / slow.busy("compute"), 1 - fast.seconds / slow.seconds
        return f"-{100 * parts[0]:.0f} %, step -{100 * parts[1]:.0f} %"

    return _of_two(cluster, told, "; ")


def changed(top: Seconds, bottom: Seconds) -> Callable[[Cluster], str]:
    """Time of one side over that of the other, minus 1."""
    return lambda cluster: _of_two(
        cluster, lambda one: f"{100 * (top(cluster, one) / bottom(cluster, one) - 1):+.0f} %"
    )


# ---- bytes ----


def pipe(model: str, B: int) -> float:
    """The paper's pipeline without reuse, 2 (2 B M + B H), in bytes."""
    M, H = MODELS[model]
    return 4 * B * 2 * (2.0 * M + H)


def states(model: str) -> float:
    """The paper's model states (eq. 1), in bytes."""
    M, H = MODELS[model]
    return 4 * (4 * (64 * M + 2 * H * M))


def without_reuse(model: str, B: int) -> float:
    """Bytes of a layer whose pipeline reuses nothing."""
    M, H = MODELS[model]
    return states(model) + 4 * (2 * (4 * B * M + B * H))


def fastmoe(model: str, B: int) -> float:
    """Bytes of FastMoE by eq. 1 to 3."""
    M, H = MODELS[model]
    return states(model) + 4 * (4 * B * M + B * H + B * M + B * H)


def slots(model: str, B: int, n: int, policy: str) -> float:
    """Bytes of the slots for a pass of B balanced rows, from a plan in f32 (the papers do not have the f32 sums of
    16-bit weight gradients)."""
    machine = copy.deepcopy(machines.load(A100[0]).data)
    machine["gemm"]["f32"] = machine["gemm"]["f16"]
    planner = Planner(machines.Machine(machine, {}))
    M, H = MODELS[model]
    found = planner.predict(Workload(M, H, B, 64, 1, 64, "f32"), Choice(n, *SETS[policy], "per_chunk"))
    return found.bytes["slot"] / found.chunk_rows * B / n


def _cells() -> Iterator[tuple[str, int]]:
    return ((model, B) for model in MODELS for B in BATCHES)


def _footprint(B: int, model: str, n: int) -> object:
    """The paper's equations 1 to 6."""
    out = library().ffi.new("sluice_paper_footprint_t *")
    library().lib.sluice_paper_footprint(B, *MODELS[model], 64, n, out)
    return out


def _saved(shares: list[float]) -> str:
    return f"-{100 * statistics.mean(shares):.0f} % (to -{100 * max(shares):.0f} %)"


def memory(n: int) -> str:
    """Eq. 6 as printed, averaged over models and batches."""
    return _saved([_footprint(B, model, n).saved_share for model, B in _cells()])


def footprint(n: int) -> str:
    """Fig. 11's ratio with Sluice's slots as the shared buffers, averaged over models and batches."""
    return _saved([(pipe(model, B) - slots(model, B, n, "S4")) / without_reuse(model, B) for model, B in _cells()])


def of_bound(n: int) -> str:
    """The part of 2 delta that S1 to S4 save of the paper's pipeline without reuse: minimum over models and batches."""
    found = []
    for policy in STRATEGIES:
        shares = []
        for model, B in _cells():
            M, H = MODELS[model]
            delta = 4 * B * (2 * M * (n - 2) / n + H * (n - 1) / n)
            shares.append((pipe(model, B) - slots(model, B, n, policy)) / (2 * delta))
        found.append(f"{policy} {100 * min(shares):.1f} %")
    return ", ".join(found)


def lean(model: str, B: int, n: int, policy: str) -> float:
    """Bytes of a layer with Sluice's slots."""
    return states(model) + 4 * (4 * B * MODELS[model][0]) + slots(model, B, n, policy)


def beside_fastmoe(cluster: Cluster) -> str:
    """Bytes of Sluice's fastest (n, S) with reuse over FastMoE's (eq. 1 to 3), averaged over models and batches."""
    shares = []
    for model, B in _cells():
        _, n, policy = best_reuse(cluster.planner, work(model, B))
        shares.append(1 - lean(model, B, n, policy) / fastmoe(model, B))
    return f"{-100 * statistics.mean(shares):+.0f} % ({-100 * min(shares):+.0f} to {-100 * max(shares):+.0f} %)"


def shares_of_bytes(model: str) -> str:
    """The share of activations and temporary buffers in all bytes without a pipeline, from eq. 1 to 3."""
    found = []
    for batch in FIG_2:
        out = _footprint(batch, model, 1)
        part = out.activations + out.temporaries
        found.append(f"{batch}: {100 * part / (part + out.states):.0f} %")
    return ", ".join(found)


def fig_11(cluster: Cluster) -> str:
    """GPT-XL at 16k: milliseconds of a step, and bytes over those of FastMoE."""
    model, B = "GPT-XL", 16384
    load, whole = work(model, B), fastmoe(model, B)
    kept = without_reuse(model, B)
    chosen, n, policy = best_reuse(cluster.planner, load)
    points = (
        ("FastMoE", fixed(1)(cluster, load), whole),
        ("FasterMoE", destination(cluster, load), kept),
        ("PipeMoE(n=4)", fixed(4)(cluster, load), kept),
        ("PipeMoE", pipemoe(cluster, load), kept),
        ("MPipeMoE", chosen, lean(model, B, n, policy)),
    )
    return ", ".join(f"{name} {1e3 * time:.1f} ms {held / whole:.2f}" for name, time, held in points)


# ---- all lines ----


def table() -> list[Row]:
    """Every line, published and simulated."""
    adira, valor = {name: Cluster(name) for name in A100}, {"v100-4x4-56g": Cluster("v100-4x4-56g")}
    strategies_published = "8 GPUs: S1, S2 before S3, S4; 32 and 64: S4 before S2"
    return [
        Row("without reuse over unsplit, both with Tensor Cores", "MPipeMoE Fig. 8", "above 1 but for GPT-S at 4k",
            each(adira, over(fixed(1), pipemoe))),
        Row("without reuse over unsplit (FastMoE), that without Tensor Cores", "MPipeMoE Fig. 8", "to 3.7",
            each(adira, over(unsplit_slow, pipemoe))),
        Row("n and S chosen over split by destination, both with Tensor Cores", "MPMoE Fig. 10", "1.66 (to 2.32)",
            each(adira, over(destination, adaptive))),
        Row("without reuse over split by destination, that without Tensor Cores", "MPipeMoE Fig. 8", "2.26 (to 3.4)",
            each(adira, over(destination_slow, pipemoe))),
        Row("adaptive over fixed n = 4", "MPipeMoE Fig. 11", "faster", each(adira, over(fixed(4), pipemoe))),
        Row("GPT-S at 4k: best pipelined n over n = 1", "MPipeMoE V-C", "no gain", each(adira, small_batch)),
        Row("best n of GPT-XL by B", "MPipeMoE Fig. 12", "<8k:2 8k-22k:4 >22k:8", each(adira, best_chunks)),
        *(
            Row(f"memory at n = {n}", "MPMoE Fig. 11", published, {"eq. 6": memory(n), "plan": footprint(n)})
            for n, published in ((2, "-23 %"), (4, "-34 %"), (8, "-38 %"))
        ),
        *(
            Row(f"saved of eq. 5's bound at n = {n}, the least of all models and batches", "MPipeMoE Fig. 10",
                "about 95 %", {"plan": of_bound(n)})
            for n in (2, 4, 8)
        ),
        Row("order of S1 to S4, GPT-XL at 16k", "MPipeMoE Fig. 13", strategies_published,
            each(adira, lambda c: strategies(c.planner))),
        Row("order of S1 to S4, GEMMs at 60 TFLOP/s", "MPipeMoE Fig. 13", strategies_published,
            each(adira, lambda c: strategies(c.slow_gemms))),
        Row("bytes of n and S chosen over FastMoE's", "MPipeMoE Fig. 9", "-23 % (to -40 %)",
            each(adira, beside_fastmoe)),
        Row("throughput of 8 servers over one, n and S chosen", "MPMoE Fig. 17", "5.76 x (72 %)",
            each(adira, scaled(adaptive))),
        Row("throughput of 8 servers over one, by destination", "MPMoE Fig. 17", "5.4 x",
            each(adira, scaled(destination))),
        Row("max(comm, comp) of n = 6 over the best of S1 to S4", "MPMoE Fig. 16", "70 %", each(valor, of_ideal)),
        Row("Tensor Cores: computation, unsplit step", "MPMoE Fig. 16",
            "BERT-L -58 %, step -26 %; GPT-XL -44 %, step -23 %", each(valor, tensor_cores)),
        # selectors of the pair (n, S), and the cost of their choices
        Row("pm over pb, time", "MPMoE Fig. 10", "1.07 (1.66 over 1.55)", each(adira, over(by(pm), by(pb)))),
        Row("pb and pm over split by destination", "MPMoE Fig. 10", "pb 1.66, pm 1.55 (to 2.32)",
            each(adira, both_over(destination))),
        Row("pb and pm over unsplit, that without Tensor Cores", "MPMoE Fig. 10", "pb 2.34, pm 2.20",
            each(adira, both_over(unsplit_slow))),
        Row("pb and pm over unsplit, both with Tensor Cores", "MPMoE Fig. 10", "not published",
            each(adira, both_over(fixed(1)))),
        *(
            Row(f"regret: {name}", "MPMoE IV, MPipeMoE III-E", "not published",
                each({**adira, **valor}, partial(regret, name=name)))
            for name in SELECTORS
        ),
        Row("the adaptive bar, GPT-XL at 16k", "MPMoE Fig. 15, MPipeMoE Fig. 13", "as fast as the best strategy",
            each(adira, adaptive_bar)),
        Row("best strategy of GPT-XL at 4k, 8k, 16k, 32k by GPUs", "MPMoE Fig. 15, MPipeMoE Fig. 13",
            "hardly depends on B", each(adira, best_by_batch)),
        Row("throughput of 8 servers over one, pb and pm", "MPMoE Fig. 17", "pb 5.76, above pm",
            each(adira, lambda c: f"pb {scaling(c, by(pb)):.2f}, pm {scaling(c, by(pm)):.2f}")),
        # parts of a step
        Row("activations and buffers of all bytes, by tokens", "MPipeMoE Fig. 2, MPMoE Fig. 2",
            "the major part as tokens grow", {model: shares_of_bytes(model) for model in MODELS}),
        Row("slowdown factors", "MPipeMoE Fig. 3, MPMoE Fig. 3",
            "comm during copies loses most, computation next to nothing; above 0.5",
            each({**adira, **valor}, interference)),
        Row("unsplit over n and S chosen, both with Tensor Cores", "MPipeMoE Fig. 9", "to 3.1",
            each(adira, most(fixed(1)))),
        Row("unsplit over n and S chosen, that without Tensor Cores", "MPipeMoE Fig. 9", "to 3.1",
            each(adira, most(unsplit_slow))),
        Row("by destination over n and S chosen, that without Tensor Cores", "MPipeMoE Fig. 9", "to 2.8",
            each(adira, most(destination_slow))),
        Row("time and bytes, GPT-XL at 16k", "MPipeMoE Fig. 11",
            "FastMoE, FasterMoE, PipeMoE(n=4), PipeMoE: less time each; MPipeMoE: least bytes, second to PipeMoE",
            each(adira, fig_11)),
        Row("dispatch and recovery of a forward by n, GPT-XL at 16k", "MPMoE Fig. 13",
            "grows with n; FasterMoE above", each({**adira, **valor}, exchanges)),
        Row("n = 6 over n = 1, one after the other", "MPMoE Fig. 16", "BERT-L +12 %, GPT-XL +4 %",
            each(valor, changed(sequential(6), sequential(1)))),
        Row("pb over n = 6 one after the other", "MPMoE Fig. 16", "BERT-L -30 %, GPT-XL -23 %",
            each(valor, changed(by(pb), sequential(6)))),
        Row("pm over n = 6 one after the other", "MPMoE Fig. 16", "BERT-L -27 %, GPT-XL -22 %",
            each(valor, changed(by(pm), sequential(6)))),
        *papers_myelin.rows(),
    ]  # fmt: skip


OPTIONS = {"json": Option(False, "for machines")}
SMOKE: dict[str, object] = {}


def run(bench: Bench) -> list[str]:
    rows = table()
    if bench.options.json:
        bench.line(json.dumps([asdict(row) for row in rows], indent=1))
        return []
    for row in rows:
        bench.line(f"{row.what} [{row.source}]\n    published   {row.published}")
        for name, value in row.simulated.items():
            bench.line(f"    {name:<15} {value}")
    return []
