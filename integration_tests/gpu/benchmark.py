# SPDX-License-Identifier: Apache-2.0
"""Measures one layer, forward and backward in bf16, on one GPU: Sluice and the other installed libraries, interleaved
in one run.

    benchmark.py SHAPE [--groups NAMES] [--to FILE] [--fake]       SHAPE: gpt3-xl, mixtral, qwen3, deepseek

Writes FILE, or benchmark_SHAPE.json next to the programs: times of every round, floors, saved and peak bytes,
versions. --fake: tiny sizes in f32 on this CPU, to test the script; such a record has `"fake": true`, and its times
do not count.

Groups: `whole`, all experts on this GPU, against the floor and the peers; `ep_rank`, an eighth of the experts with
the same rows, n = 1 and n = 4 (with all experts resident chunking would only measure how often weights are read), by
policy and under a budget; `offload`; `fused_peers`. --groups: only these, with commas. Floors: kernels at 790
TFLOP/s and 4.3 TB/s, without accumulation of gradients in f32, with which nothing here is run. Parts that fail are
named with the reason, and the others are still written; exit 1 if a failed part was Sluice's own.
"""

import argparse
import gc
import json
import os
import pathlib
import platform
import statistics
import sys
import time

import package

TOKENS = 16384
# model width, hidden width, experts, top k, gated, floor of forward + backward in ms
SHAPES = {
    "gpt3-xl": (2048, 8192, 64, 1, False, 4.18),
    "mixtral": (4096, 14336, 8, 2, True, 44.0),
    "qwen3": (2048, 768, 128, 8, True, 4.98),
    "deepseek": (7168, 2048, 256, 8, True, 44.8),
}
FAKE = {"tokens": 64, "divide": 128, "experts": 8}
ROUNDS, WARM_UP = 20, 5
COMPUTE, COPIES = "compute", ("copy_out", "copy_in")  # lanes of the trace
FUSED = ("sonicmoe", "deepgemm")  # transformers' names of external kernels
BUDGET_OF_PEAK = 0.7


class Sizes:
    def __init__(self, name, fake, share=1):
        self.M, self.H, self.E, self.K, self.gated, self.floor_ms = SHAPES[name]
        self.T = TOKENS
        if fake:
            self.T, self.E = FAKE["tokens"], FAKE["experts"]
            self.M, self.H = max(self.M // FAKE["divide"], 16), max(self.H // FAKE["divide"], 16)
            self.K = min(self.K, 4)
        self.E //= share
        # The number of rows stays: an expert-parallel rank receives as many as it sends.
        self.T, self.K = self.T * self.K // min(self.K, self.E), min(self.K, self.E)


class Inputs:
    """Has random inputs and routes, which all libraries share, so that all compute the same."""

    def __init__(self, torch, sizes, device, dtype):
        s, factor = sizes, 2 if sizes.gated else 1
        make = torch.Generator().manual_seed(7)
        self.sizes, self.device, self.dtype = sizes, device, dtype
        self.tokens = torch.randn(s.T, s.M, generator=make).to(device, dtype).requires_grad_()
        self.grad = torch.randn(s.T, s.M, generator=make).to(device, dtype)
        self.ids = torch.rand(s.T, s.E, generator=make).topk(s.K, dim=1).indices.to(device)
        self.weights = torch.rand(s.T, s.K, generator=make).to(device).requires_grad_()
        with torch.device(device):
            self.up = (torch.randn(s.E, factor * s.H, s.M, dtype=dtype) * s.M**-0.5).requires_grad_()
            self.down = (torch.randn(s.E, s.M, s.H, dtype=dtype) * s.H**-0.5).requires_grad_()

    def leaves(self):
        return [self.tokens, self.weights, self.up, self.down]


def make_layer(x, chunks, policy, context):
    """Makes a layer. policy None: Sluice's choice, under the context's budget."""
    from sluice.adapters.torch import MoeConfig, StackedLayer

    s = x.sizes

    def views(flat):
        up, down = flat
        return (*(up.chunk(2, 1) if s.gated else (up,)), down)

    return StackedLayer(
        context,
        MoeConfig(
            model_width=s.M,
            hidden_width=s.H,
            num_experts=s.E,
            top_k=s.K,
            dtype=x.dtype,
            activation="silu" if s.gated else "gelu",
            gated=s.gated,
            chunks=chunks,
            policy=policy,
        ),
        views=views,
    )


def sluice_layer(x, chunks=1, policy=("redispatch", "keep"), context=None):
    """Returns a call of a layer. The default policy, as in transformers' adapter: only pre-activations are kept."""
    from sluice.adapters.torch import Context

    layer = make_layer(x, chunks, policy, context or Context(device=x.device))
    return lambda: layer(x.tokens, x.ids, x.weights, [x.up, x.down])


def torch_grouped(torch, x):
    """Returns a call of what a careful user writes: sort, torch._grouped_mm, weighted sum."""
    s, act = x.sizes, torch.nn.functional.silu if x.sizes.gated else torch.nn.functional.gelu

    def run():
        flat = x.ids.flatten()
        order = flat.argsort(stable=True)
        ends = torch.bincount(flat, minlength=s.E).cumsum(0).to(torch.int32)
        rows = x.tokens[order // s.K]
        hidden = torch._grouped_mm(rows, x.up.transpose(1, 2), offs=ends)
        hidden = act(hidden[:, : s.H]) * hidden[:, s.H :] if s.gated else act(hidden)
        out = torch._grouped_mm(hidden, x.down.transpose(1, 2), offs=ends)
        out = out * x.weights.flatten()[order, None].to(out.dtype)
        return torch.zeros_like(x.tokens).index_add(0, order // s.K, out)

    return run


def transformers_experts(torch, x, name):
    """Returns a call of transformers' experts, gated (Mixtral) or not (Nemotron-H)."""
    from transformers import MixtralConfig
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    s = x.sizes
    config = MixtralConfig(hidden_size=s.M, intermediate_size=s.H, num_local_experts=s.E, num_experts_per_tok=s.K)

    class Ungated(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts, self.act_fn = s.E, torch.nn.functional.gelu

    with torch.device("meta"):
        module = MixtralExperts(config) if s.gated else use_experts_implementation(has_gate=False)(Ungated)(config)
    up, module.down_proj = torch.nn.Parameter(x.up), torch.nn.Parameter(x.down)
    setattr(module, "gate_up_proj" if s.gated else "up_proj", up)
    run, leaves = ALL_EXPERTS_FUNCTIONS[name], [x.tokens, x.weights, up, module.down_proj]
    return (lambda: run(module, x.tokens, x.ids, x.weights.to(x.dtype))), leaves


def transformer_engine(torch, x):
    """Returns a call of TE's permutation around its grouped GEMMs, which need the numbers of rows on the host."""
    import transformer_engine.pytorch as te

    s, act = x.sizes, torch.nn.functional.silu if x.sizes.gated else torch.nn.functional.gelu
    made = {"bias": False, "params_dtype": x.dtype, "device": x.device}
    up = te.GroupedLinear(s.E, s.M, x.up.shape[1], **made)
    down = te.GroupedLinear(s.E, s.H, s.M, **made)
    for module, weights in ((up, x.up), (down, x.down)):
        for e in range(s.E):
            getattr(module, f"weight{e}").data = weights.data[e]

    def run():
        counts = torch.bincount(x.ids.flatten(), minlength=s.E).tolist()
        rows, places = te.moe_permute(x.tokens, x.ids.to(torch.int32), map_type="index")
        hidden = up(rows, counts)
        hidden = act(hidden[:, : s.H]) * hidden[:, s.H :] if s.gated else act(hidden)
        return te.moe_unpermute(down(hidden, counts), places, x.weights, map_type="index")

    return run, [x.tokens, x.weights, *up.parameters(), *down.parameters()]


class Clock:
    """Measures milliseconds between two points of the stream; on a CPU, of the clock."""

    def __init__(self, torch, device):
        self.torch, self.is_cuda = torch, device.type == "cuda"

    def now(self):
        if not self.is_cuda:
            return time.perf_counter()
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, a, b):
        if not self.is_cuda:
            return (b - a) * 1e3
        b.synchronize()
        return a.elapsed_time(b)


def measure(torch, x, run, leaves, clock):
    """Returns (forward, backward) in ms."""
    begin = clock.now()
    out = run()
    middle = clock.now()
    torch.autograd.grad(out, leaves, x.grad)
    end = clock.now()
    return clock.between(begin, middle), clock.between(middle, end)


def bytes_of(torch, x, run, leaves):
    """Returns the bytes that autograd keeps in addition to the inputs, and the peak of allocations above the start."""
    known = {tensor.untyped_storage().data_ptr() for tensor in leaves}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    cuda = torch.cuda if x.device.type == "cuda" else None
    before = 0
    if cuda:
        cuda.synchronize()
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    torch.autograd.grad(out, leaves, x.grad)
    peak = cuda.max_memory_allocated() - before if cuda else None
    return {"saved_bytes": sum(kept.values()), "torch_peak_bytes": peak}


def compare(torch, x, contenders, rounds):
    """Measures all contenders, round by round, each round in another order."""
    clock, found, refused = Clock(torch, x.device), {}, {}
    ready = {}
    for name, make in contenders.items():
        try:
            made = make()
            run, leaves = made if isinstance(made, tuple) else (made, x.leaves())
            for _ in range(WARM_UP if rounds > 3 else 1):
                measure(torch, x, run, leaves, clock)
            ready[name] = (run, leaves)
            found[name] = {"forward_ms": [], "backward_ms": [], **bytes_of(torch, x, run, leaves)}
        except Exception as error:  # a peer is missing, or refuses this shape; an error of Sluice fails the run later
            refused[name] = f"{type(error).__name__}: {error}"[:300]
    names = list(ready)
    for i in range(rounds if names else 0):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            forward, backward = measure(torch, x, *ready[name], clock)
            found[name]["forward_ms"].append(round(forward, 4))
            found[name]["backward_ms"].append(round(backward, 4))
    for result in found.values():
        both = [a + b for a, b in zip(result["forward_ms"], result["backward_ms"])]
        result["median_ms"], result["min_ms"] = round(statistics.median(both), 4), round(min(both), 4)
    return found, refused


def under_a_budget(torch, x, rounds):
    """Measures time and bytes at n = 4 with Sluice's choice of policies, under a budget of a part of the bytes that
    keeping everything takes, or of the minimum."""
    from sluice.adapters.torch import Context, ContextOptions

    least = make_layer(x, 4, None, Context(device=x.device)).smallest_budget(x.sizes.T)
    free = Context(device=x.device)
    torch.autograd.grad(sluice_layer(x, 4, ("keep", "keep"), free)(), x.leaves(), x.grad)
    most = free.stats()["peak_bytes"]
    budget = max(int(most * BUDGET_OF_PEAK), least * 5 // 4)  # in addition, the budget's own bookkeeping
    context = Context(options=ContextOptions(memory_budget=budget, max_outstanding=1), device=x.device)
    found, refused = compare(torch, x, {"sluice n=4 budget": lambda: sluice_layer(x, 4, None, context)}, rounds)
    sizes = {
        "peak_bytes_of_keeping": most,
        "least": least,
        "memory_budget": budget,
        "peak_bytes": context.stats()["peak_bytes"],
    }
    return {**found, **sizes}, refused


def link_speeds(torch, device):
    """Measures bytes per second between the device and pinned memory: out, in, and out during equal copies in."""
    size, clock = (1 << 28 if device.type == "cuda" else 1 << 16), Clock(torch, device)
    pinned = {"pin_memory": device.type == "cuda"}
    there = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    here = [torch.empty(size, dtype=torch.uint8, **pinned) for _ in range(2)]
    side = torch.cuda.Stream() if device.type == "cuda" else None

    def out():
        here[0].copy_(there[0], non_blocking=True)

    def back():
        there[1].copy_(here[1], non_blocking=True)

    def both():
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                back()
        else:
            back()
        out()
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)

    def fastest(copy):
        times = []
        for _ in range(6):
            begin = clock.now()
            copy()
            times.append(clock.between(begin, clock.now()))
        return size / (min(times) * 1e-3)

    return {"out": fastest(out), "in": fastest(back), "each_way_at_once": fastest(both)}


def offload_of(kept, gone, speeds):
    """Returns the part of the copies' time that overlapped compute. `kept`, `gone`: results of the same layer with rows
    on the device and in pinned memory; copies out run in forward, copies in run in backward."""
    out_ms, in_ms = (1e3 * kept["saved_bytes"] / speeds[way] for way in ("out", "in"))
    added_ms = gone["median_ms"] - kept["median_ms"]
    # Each direction overlaps only its own half of the step, so a slow link cannot be hidden completely.
    halves = [(out_ms, kept["forward_ms"]), (in_ms, kept["backward_ms"])]
    hideable = sum(min(ms, statistics.median(half)) for ms, half in halves) / (out_ms + in_ms)
    return {
        "link_bytes_per_s": speeds,
        "bytes_each_way": kept["saved_bytes"],
        "out_ms": round(out_ms, 4),
        "in_ms": round(in_ms, 4),
        "added_ms": round(added_ms, 4),
        "hidden": round(1 - added_ms / (out_ms + in_ms), 4),
        "hideable_at_this_link": round(hideable, 4),
    }


def overlap_of(torch, x, chunks, policy):
    """Returns the part of the copies that ran during compute in one step, by the device's own events.

    A traced pass waits for its end, so this step's time is not comparable."""
    from sluice.adapters.torch import Context

    context = Context(device=x.device)
    run = sluice_layer(x, chunks, policy, context)
    for _ in range(WARM_UP):
        torch.autograd.grad(run(), x.leaves(), x.grad)
    context.trace_start()
    torch.autograd.grad(run(), x.leaves(), x.grad)
    events = [event for event in context.trace_take() if event["chunk"] >= 0 or event["op"] != "pass"]
    compute = sorted((e["begin_ns"], e["end_ns"]) for e in events if e["lane"] == COMPUTE)
    copies = [(e["begin_ns"], e["end_ns"]) for e in events if e["lane"] in COPIES]
    overlap = sum(max(0, min(end, b) - max(begin, a)) for begin, end in copies for a, b in compute)
    ops = {}
    for event in events:
        ops[event["op"]] = ops.get(event["op"], 0) + event["end_ns"] - event["begin_ns"]
    copied = sum(end - begin for begin, end in copies)
    return {
        "ops_ms": {op: round(ns * 1e-6, 4) for op, ns in sorted(ops.items())},
        "compute_ms": round(sum(b - a for a, b in compute) * 1e-6, 4),
        "copies_ms": round(copied * 1e-6, 4),
        "copies_beside_compute": round(overlap / copied, 4) if copied else None,
    }


def versions(torch, device):
    from sluice.adapters.torch import Context

    found = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    try:
        import transformers

        found["transformers"] = transformers.__version__
    except ImportError:
        found["transformers"] = None

    found["gemms"] = Context(device=device).stats()["gemm"]
    found["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
    return found


def verdicts(record, sizes):
    """Yields (what, value, the project's target) by the record. None: what it needs has not run."""
    whole, offload = record["whole"], record["offload"]
    ms = {name: result["median_ms"] for group in ("whole", "ep_rank") for name, result in record[group].items()}
    ours, theirs = ms.get("sluice"), ms.get("transformers")
    limit = 2 * sizes.T * sizes.M + 4 * sizes.T * sizes.K * sizes.H  # SonicMoE's, bytes in bf16
    hideable = offload.get("hideable_at_this_link")
    n1, n4 = ms.get("sluice n=1"), ms.get("sluice n=4")
    of_floor = 0.85 if record["shape"] in ("gpt3-xl", "mixtral") else 0.7
    yield "of_floor", round(sizes.floor_ms / ours, 4) if ours else None, f"at least {of_floor}"
    yield "ahead_of_transformers", ours < theirs if ours and theirs else None, "True"
    yield "saved_bytes_at_most_sonicmoe", whole["sluice"]["saved_bytes"] <= limit if ours else None, "True"
    hidden = round(offload["hidden"] / hideable, 4) if hideable else None
    yield "offload_hidden_of_hideable", hidden, "at least 0.9"
    yield "n4_over_n1", round(n4 / n1, 4) if n1 and n4 else None, "at most 1.03"


def say(record, sizes):
    name = record["shape"]
    for group in ("whole", "ep_rank", "budget", "fused_peers"):
        for contender, result in record.get(group, {}).items():
            if isinstance(result, dict):
                print(f"{name} {group}: {contender}: {result['median_ms']} ms, saved {result['saved_bytes']} bytes")
    for contender, why in record["refused"].items():
        print(f"{name}: {contender} did not run: {why}")
    for what, value, target in verdicts(record, sizes):
        print(f"{name}: {what}: {'not known' if value is None else value} (wanted: {target})")


def make_room(torch, device):
    """Empties torch's cache: the next group has other shapes, and Sluice does not allocate its memory from torch."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def whole(torch, x, rounds):
    """Compares with all experts on this GPU. The inputs are freed at the end of the call."""
    contenders = {
        "sluice": lambda: sluice_layer(x),
        "transformers": lambda: transformers_experts(torch, x, "grouped_mm"),
        "torch grouped_mm": lambda: torch_grouped(torch, x),
    }
    return compare(torch, x, contenders, rounds)


def fused_peers(torch, x, rounds):
    """Compares with installed kernels of others. They run last, after everything else is written: a kernel that reads
    out of bounds would end the process's CUDA context."""
    contenders = {"sluice": lambda: sluice_layer(x)}
    contenders["transformer engine"] = lambda: transformer_engine(torch, x)
    for name in FUSED:
        contenders[f"transformers {name}"] = lambda name=name: transformers_experts(torch, x, name)
    return compare(torch, x, contenders, rounds)


def as_one_rank(torch, x, rounds):
    """Compares settings with an eighth of the experts and the same rows."""
    contenders = {f"sluice n={n}": lambda n=n: sluice_layer(x, n) for n in (1, 4)}
    contenders["sluice n=4 keep"] = lambda: sluice_layer(x, 4, ("keep", "keep"))
    contenders["sluice n=4 offload"] = lambda: sluice_layer(x, 4, ("offload", "offload"))
    contenders["sluice n=4 recompute"] = lambda: sluice_layer(x, 4, ("redispatch", "recompute"))
    return compare(torch, x, contenders, rounds)


def offloaded(torch, x, ep_rank):
    kept, gone = (ep_rank.get(f"sluice n=4 {policy}") for policy in ("keep", "offload"))
    if not (kept and gone):
        return {}, {}
    by_ops = overlap_of(torch, x, 4, ("offload", "offload"))
    return {**offload_of(kept, gone, link_speeds(torch, x.device)), "by_ops": by_ops}, {}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--groups", default="whole,ep_rank,budget,offload,fused_peers")
    parser.add_argument("--to", type=pathlib.Path)
    parser.add_argument("--fake", action="store_true")
    options = parser.parse_args()
    fake, name, groups = options.fake, options.shape, options.groups.split(",")
    device = package.ready(fake)
    import torch

    dtype, rounds = (torch.float32, 2) if fake else (torch.bfloat16, ROUNDS)
    sizes = Sizes(name, fake)
    record = {"shape": name, "fake": fake, "tokens": sizes.T, "dtype": str(dtype), "floor_ms": sizes.floor_ms}
    record |= {"gradients_accumulated_in_f32": False, "versions": versions(torch, device)}
    record |= {"whole": {}, "ep_rank": {}, "budget": {}, "offload": {}, "refused": {}}
    default = pathlib.Path(os.environ.get("SLUICE_GPU_BUILD", ".")) / f"benchmark_{name}.json"
    target = options.to or default

    def group(group, what, run, make, more):
        """Writes the record after the group, so that one that fails loses no results, and names the reason."""
        if group not in groups:
            return
        try:
            record[group], refused = run(torch, make(), more)
            record["refused"] |= refused
        except Exception as error:
            record["refused"][what] = f"{type(error).__name__}: {error}"[:300]
        target.write_text(json.dumps(record, indent=1) + "\n")

    def all_experts():
        return Inputs(torch, sizes, device, dtype)

    group("whole", "sluice", whole, all_experts, rounds)
    make_room(torch, device)
    share = [Inputs(torch, Sizes(name, fake, 8), device, dtype)]
    group("ep_rank", "sluice as one rank", as_one_rank, lambda: share[0], rounds)
    group("budget", "sluice n=4 budget", under_a_budget, lambda: share[0], rounds)
    group("offload", "sluice n=4 offload", offloaded, lambda: share[0], record["ep_rank"])
    share.clear()
    make_room(torch, device)
    group("fused_peers", "fused peers", fused_peers, all_experts, rounds)
    say(record, sizes)
    print(f"written to {target.name}: {len(record['whole']) + len(record['ep_rank'])} contenders ran")
    return 1 if any(contender.startswith("sluice") for contender in record["refused"]) else 0


if __name__ == "__main__":
    sys.exit(main())
