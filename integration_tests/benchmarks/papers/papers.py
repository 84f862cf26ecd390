# SPDX-License-Identifier: Apache-2.0
"""The papers' own figures, published and simulated, on profiles of the papers' clusters.

Sluice's real schedules run in virtual time. The profiles (python_plugin/sluice/planning/profiles) contain datasheet
rates with assumed efficiencies, which are not fitted, except for one number in one line. The two papers describe the
links of the A100 cluster differently (200 Gb/s a server, 1,600 Gb/s a server), so both readings are simulated.

papers_cluster.py has the code that all lines share. papers_choices.py has the lines on selectors of n and S,
papers_parts.py the lines on parts (bytes by kind, interference, exchanges by n), papers_myelin.py those of Myelin
(AxoNN).
"""

import copy
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from sluice._library import load
from sluice.planning import machines
from sluice.planning.planner import Choice, Planner, Workload
from sluice.restore import SETS

from integration_tests.benchmarks.measuring.bench import Bench, Option
from integration_tests.benchmarks.papers import papers_choices, papers_myelin, papers_parts
from integration_tests.benchmarks.papers.papers_cluster import (
    A100,
    BATCHES,
    MODELS,
    STRATEGIES,
    Cluster,
    Prices,
    Row,
    best,
    best_reuse,
    each,
    seconds,
    work,
)


def speedups(cluster: Cluster, baseline: Callable[[Cluster, Workload], float], chosen: Any = best) -> str:
    """Speed-ups of PipeMoE (everything kept, best n) over models and batches: mean, minimum and maximum. With
    chosen = best_reuse for MPMoE: n and one of S1 to S4, chosen together."""
    loads = [work(model, batch) for model in MODELS for batch in BATCHES]
    ratios = [baseline(cluster, load) / chosen(cluster.planner, load)[0] for load in loads]
    return f"{statistics.mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


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


def memory(n: int) -> str:
    """Eq. 6 as printed, averaged over models and batches."""
    library = load()
    out = library.ffi.new("sluice_paper_footprint_t *")
    shares = []
    for M, H in MODELS.values():
        for batch in BATCHES:
            library.lib.sluice_paper_footprint(batch, M, H, 64, n, out)
            shares.append(out.saved_share)
    return f"-{100 * statistics.mean(shares):.0f} % (to -{100 * max(shares):.0f} %)"


def slots(model: str, B: int, n: int, policy: str) -> float:
    """Bytes of the slots for a pass of B balanced rows, from a plan in f32 (the papers do not have the f32 sums of
    16-bit weight gradients)."""
    machine = copy.deepcopy(machines.load(A100[0]).data)
    machine["gemm"]["f32"] = machine["gemm"]["f16"]
    planner = Planner(machines.Machine(machine, {}))
    M, H = MODELS[model]
    found = planner.predict(Workload(M, H, B, 64, 1, 64, "f32"), Choice(n, *SETS[policy], "per_chunk"))
    return found.bytes["slot"] / found.chunk_rows * B / n


def without_reuse(model: str, B: int) -> float:
    """The paper's pipeline without reuse, 2 (2 B M + B H), in bytes."""
    M, H = MODELS[model]
    return 4 * B * 2 * (2.0 * M + H)


def of_bound(n: int) -> str:
    """The part of 2 delta that S1 to S4 save of the paper's pipeline without reuse: minimum over models and batches."""
    found = []
    for policy in STRATEGIES:
        shares = []
        for model, (M, H) in MODELS.items():
            for B in BATCHES:
                delta = 4 * B * (2 * M * (n - 2) / n + H * (n - 1) / n)
                shares.append((without_reuse(model, B) - slots(model, B, n, policy)) / (2 * delta))
        found.append(f"{policy} {100 * min(shares):.1f} %")
    return ", ".join(found)


def footprint(n: int) -> str:
    """Fig. 11's ratio with Sluice's slots as the shared buffers, averaged over models and batches."""
    shares = []
    for model, (M, H) in MODELS.items():
        for B in BATCHES:
            whole = 4 * (4 * (64 * M + 2 * H * M) + 2 * (4 * B * M + B * H))
            shares.append((without_reuse(model, B) - slots(model, B, n, "S4")) / whole)
    return f"-{100 * statistics.mean(shares):.0f} % (to -{100 * max(shares):.0f} %)"


def beside_fastmoe(cluster: Cluster) -> str:
    """Bytes of Sluice's fastest (n, S) with reuse over FastMoE's (eq. 1 to 3), averaged over models and batches."""
    shares = []
    for model, (M, H) in MODELS.items():
        for B in BATCHES:
            _, n, policy = best_reuse(cluster.planner, work(model, B))
            states = 4 * (64 * M + 2 * H * M)
            fastmoe = 4 * (states + 4 * B * M + B * H + B * M + B * H)
            shares.append(1 - (4 * (states + 4 * B * M) + slots(model, B, n, policy)) / fastmoe)
    return f"{-100 * statistics.mean(shares):+.0f} % ({-100 * min(shares):+.0f} to {-100 * max(shares):+.0f} %)"


def strategies(planner: Prices) -> str:
    """S1 to S4 in order of time for GPT-XL at 16k, for each number of GPUs."""
    found = []
    for ranks in (8, 32, 64):
        one = work("GPT-XL", 16384, ranks)
        order = sorted((best(planner, one, policy)[0], policy) for policy in STRATEGIES)
        found.append(f"{ranks}: " + " ".join(f"{policy} {1e3 * time:.1f}" for time, policy in order))
    return "; ".join(found) + " ms"


def scaling(cluster: Cluster, chosen: Callable[[Cluster, Workload], float]) -> str:
    """Throughput of 8 servers over that of one server, with a fixed number of tokens per GPU."""
    ratios = []
    for model in MODELS:
        for batch in BATCHES:
            one, eight = (chosen(cluster, work(model, batch, ranks)) for ranks in (8, 64))
            ratios.append(8 * one / eight)
    return f"{statistics.mean(ratios):.2f} x ({100 * statistics.mean(ratios) / 8:.0f} %)"


def of_ideal(cluster: Cluster) -> str:
    """max(communication, computation) of a sequential n = 6 over the best of S1 to S4, as in Fig. 16."""
    found = []
    for model in ("BERT-L", "GPT-XL"):
        one = work(model, 16384, cluster.data["world_size"])
        six = cluster.sequential.predict(one, Choice(6, "keep", "keep", "per_chunk"))
        ideal = max(six.busy("compute"), six.busy("comm"))
        reached = best_reuse(cluster.planner, one)[0]
        found.append(f"{model} {100 * ideal / reached:.0f} %")
    return ", ".join(found)


def tensor_cores(cluster: Cluster) -> str:
    """The reduction of computation, and of the unsplit step, by Tensor Cores."""
    found = []
    for model in ("BERT-L", "GPT-XL"):
        one = work(model, 16384, cluster.data["world_size"])
        choice = Choice(1, "keep", "keep", "deferred")
        fast, slow = (planner.predict(one, choice) for planner in (cluster.planner, cluster.no_tensor_cores))
        parts = 1 - fast.busy("compute") / slow.busy("compute"), 1 - fast.seconds / slow.seconds
        found.append(f"{model} -{100 * parts[0]:.0f} %, step -{100 * parts[1]:.0f} %")
    return "; ".join(found)


def table() -> list[Row]:
    """Every line, published and simulated."""
    adira = {name: Cluster(name) for name in A100}
    valor = {"v100-4x4-56g": Cluster("v100-4x4-56g")}

    def unsplit(cluster: Cluster, one: Workload) -> float:
        return seconds(cluster.planner, one, 1)

    def unsplit_slow(cluster: Cluster, one: Workload) -> float:
        return seconds(cluster.no_tensor_cores, one, 1)

    def destination(cluster: Cluster, one: Workload) -> float:
        return seconds(cluster.by_destination, one, cluster.servers)

    def destination_slow(cluster: Cluster, one: Workload) -> float:
        return seconds(cluster.by_destination_no_tensor_cores, one, cluster.servers)

    def fixed(n: int) -> Callable[[Cluster, Workload], float]:
        return lambda cluster, one: seconds(cluster.planner, one, n)

    def adaptive(cluster: Cluster, one: Workload) -> float:
        return best_reuse(cluster.planner, one)[0]

    baselines = {
        "unsplit": unsplit,
        "unsplit in f32": unsplit_slow,
        "by destination": destination,
        "by destination in f32": destination_slow,
    }
    selectors = {
        name: partial(papers_choices.taken, choose=choose)
        for name, choose in (("pb", papers_choices.pb), ("pm", papers_choices.pm))
    }
    strategies_published = "8 GPUs: S1, S2 before S3, S4; 32 and 64: S4 before S2"
    return [
        Row("without reuse over unsplit, both with Tensor Cores", "MPipeMoE Fig. 8", "above 1 but for GPT-S at 4k",
            each(adira, lambda c: speedups(c, unsplit))),
        Row("without reuse over unsplit (FastMoE), that without Tensor Cores", "MPipeMoE Fig. 8", "to 3.7",
            each(adira, lambda c: speedups(c, unsplit_slow))),
        Row("n and S chosen over split by destination, both with Tensor Cores", "MPMoE Fig. 10", "1.66 (to 2.32)",
            each(adira, lambda c: speedups(c, destination, best_reuse))),
        Row("without reuse over split by destination, that without Tensor Cores", "MPipeMoE Fig. 8", "2.26 (to 3.4)",
            each(adira, lambda c: speedups(c, destination_slow))),
        Row("adaptive over fixed n = 4", "MPipeMoE Fig. 11", "faster",
            each(adira, lambda c: speedups(c, fixed(4)))),
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
            each(adira, lambda c: scaling(c, adaptive))),
        Row("throughput of 8 servers over one, by destination", "MPMoE Fig. 17", "5.4 x",
            each(adira, lambda c: scaling(c, destination))),
        Row("max(comm, comp) of n = 6 over the best of S1 to S4", "MPMoE Fig. 16", "70 %", each(valor, of_ideal)),
        Row("Tensor Cores: computation, unsplit step", "MPMoE Fig. 16",
            "BERT-L -58 %, step -26 %; GPT-XL -44 %, step -23 %", each(valor, tensor_cores)),
        *papers_choices.rows(adira, valor, baselines),
        *papers_parts.rows(adira, valor, baselines, selectors, slots),
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
