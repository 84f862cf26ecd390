# SPDX-License-Identifier: Apache-2.0
"""Lines of papers.py on Myelin (AxoNN, IPDPS 2022): its pipelines, all-reduces, optimizer, and choice of the grid.

All numbers come from `sluice plan --split` on a profile of Summit, with the paper's batches. Layers are Megatron's:
24 s h^2 + 4 s^2 h FLOPs of a forward, 34 s h + 5 a s^2 bytes of activations [Korthikanti et al.]. All layers but the
embedding and the head are recomputed. The paper's baselines need tensor parallelism, which is not simulated.
"""

from collections.abc import Iterable
from functools import cache

from sluice.planning import batches, machines, optimizer, split
from sluice.planning.split import Found, Layer, Model, Priced, Search, Wanted

from integration_tests.benchmarks.papers.papers_cluster import Row

S, V = 512, 51200
TABLE_1 = {12: (48, 48, 4512, 24), 24: (96, 48, 6336, 36), 50: (192, 96, 6528, 48), 100: (384, 96, 9360, 60)}
PEAK = 125e12
USABLE = int(15.5e9)  # assumed usable part of a device's 16 GB
BSIZE = 16_000_000
FAR = {"tiers": (optimizer.FAR,), "bucket": BSIZE, "slots": 1}


def model(size: int, batch: int) -> Model:
    """A model of Table I, in f16."""
    _, layers, h, a = TABLE_1[size]
    edge = 2 * S * h
    block = Layer(
        "block",
        parameters=12 * h * h + 13 * h,
        flops=24.0 * S * h * h + 4.0 * S * S * h,
        activation_bytes=34 * S * h + 5 * a * S * S,
        checkpoint_bytes=edge,
        output_bytes=edge,
    )
    ends = {"activation_bytes": edge, "checkpoint_bytes": edge, "may_recompute": False}
    embedding = Layer("embedding", parameters=V * h + S * h, output_bytes=edge, may_recompute=False)
    head = Layer("head", parameters=V * h, flops=2.0 * S * h * V, workspace_bytes=4 * S * V, **ends)
    return Model((embedding, *([block] * layers), head), batch, S, "f16")


@cache
def found(size: int, ranks: int, batch: int, budget: int = 0, **fixed: object) -> Found:
    wanted = Wanted(schedule="message_driven", recompute=split.ALWAYS, **fixed)  # type: ignore[arg-type]
    return Search(machines.load("v100-8x6-edr"), model(size, batch), budget, wanted).run(ranks)


def tuned(size: int) -> Priced:
    """The best split of Table II's model in the memory of a device, with the paper's optimizer in host memory."""
    return found(size, TABLE_1[size][0], 16384, USABLE, **FAR).priced[0]


def of_peak(size: int, seconds: float) -> float:
    """The paper's formula for FLOP/s, over the peak of all devices."""
    ranks, layers, h, _ = TABLE_1[size]
    flops = 96.0 * 16384 * S * layers * h * h * (1 + S / (6 * h) + V / (16 * layers * h))
    return flops / seconds / (ranks * PEAK)


def days(batch: int, seconds: float) -> float:
    """Days for 3e11 tokens, by the paper's formula."""
    return 3e11 * seconds / (batch * S) / 86400


def fixed(pipeline: int, tier: str = optimizer.FAR, has_optimizer: bool = True) -> Priced:
    """The 12 B model on 48 devices with a batch of 2,048, as in Fig. 5 to 8."""
    words = {**FAR, "tiers": (tier,), "pipeline": pipeline, "micro_batch": 1, "order": split.STAGES_FIRST}
    words["has_optimizer"] = has_optimizer
    return found(12, 48, 2048, **words).priced[0]


def _line(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def second_best() -> str:
    """Time with the paper's own micro-batch over the best time on the same grid."""
    shares = []
    for size, published in zip(TABLE_1, (8, 4, 4, 2)):
        best = tuned(size)
        words = {**FAR, "pipeline": best.split.pipeline, "micro_batch": published}
        shares.append(found(size, TABLE_1[size][0], 16384, USABLE, **words).priced[0].seconds / best.seconds)
    return _line([f"{share:.3f}" for share in shares])


def figure_5() -> str:
    times = {pipeline: fixed(pipeline, has_optimizer=False).batch_seconds for pipeline in (6, 12, 24, 48)}
    listed = _line([f"{pipeline}: {seconds:.1f} s" for pipeline, seconds in times.items()])
    return f"{listed}; 24 over 6: {times[24] / times[6]:.2f}"


def _step(k: int, priced: Priced, sums: bool = True) -> optimizer.Prediction:
    """The optimizer of the stage with the most parameters, with the all-reduce if `sums`."""
    data, count = machines.load("v100-8x6-edr").data, _count(priced)
    copied = data["host_copy"]["bytes_per_second"]
    rates = {"update_rate": data["rows"]["bytes_per_second"], "copy_in_rate": copied, "copy_out_rate": copied}
    work = optimizer.Workload(count, dtype="f16", bucket=BSIZE, slots=1, sum_buckets=k, **rates)
    if not sums:
        return optimizer.predict(work)
    work = optimizer.Workload(**{**vars(work), "world_size": priced.split.data})
    alone = optimizer.predict(optimizer.Workload(**{**vars(work), "sum_rate": 1.0})).parts["sum"]
    hops = 2 * (priced.split.data - 1)
    startup = hops * data["exchange"]["startup_seconds"]
    rate = alone / (priced.sum_seconds - startup)
    return optimizer.predict(optimizer.Workload(**{**vars(work), "sum_rate": rate, "sum_seconds": startup}))


def _count(priced: Priced) -> int:
    own = priced.plan.choices
    return max(
        sum(layer.parameter_bytes // 2 for layer, choice in zip(priced.problem.layers, own) if choice.stage == stage)
        for stage in range(priced.split.pipeline)
    )


def figure_8() -> str:
    """Seconds of the all-reduce overlapped with the optimizer, by k, and of the two in sequence."""
    priced = fixed(6)
    listed = [f"k {k}: {_step(k, priced).seconds:.2f} s" for k in (1, 2, 4, 8, 16)]
    apart = priced.sum_seconds + _step(1, priced, sums=False).seconds
    return _line(listed) + f"; no overlap: {apart:.2f} s"


def baseline() -> str:
    """The best split of the 12 B model with all states on the device."""
    one = found(12, 48, 2048, USABLE, **{**FAR, "tiers": (optimizer.NEAR,)}).priced[0].split
    return f"{one.pipeline}x{one.data}, micro-batch {one.micro_batch}"


def strong() -> str:
    """Scaling efficiency of 96, 192 and 384 devices over 48; the batch grows with the devices, from 4,096 to 32,768."""
    times = {}
    for ranks in (48, 96, 192, 384):
        words = {**FAR, "pipeline": 6, "micro_batch": tuned(12).split.micro_batch}
        times[ranks] = found(12, ranks, 4096 * ranks // 48, USABLE, **words).priced[0].seconds
    return _line([f"{ranks}: {100 * times[48] / seconds:.1f} %" for ranks, seconds in times.items() if ranks > 48])


def rows() -> list[Row]:
    best = {size: tuned(size) for size in TABLE_1}
    splits = [one.split for one in best.values()]
    reused, kept = fixed(6), fixed(24, optimizer.NEAR)  # with the memory optimization, and without
    parameters = [sum(layer.parameters for layer in model(size, 1).layers) / 1e9 for size in TABLE_1]
    states = _step(1, reused).bytes  # 20 per parameter, and 4 per parameter plus one bucket
    near, far = (one.split.data * sum(stage["bytes"] for stage in one.plan.stages) / 1e9 for one in (kept, fixed(24)))
    gaps = [batches.checkpoint_interval(TABLE_1[size][1], one.split.pipeline) for size, one in best.items()]
    lines = [
        ("parameters of the models", "Table I", "12, 24, 50, 100 B", _line(f"{n:.1f}" for n in parameters) + " B"),
        ("G_inter x G_data of the best split", "Table II", "6x8, 12x8, 24x8, 48x8",
         _line(f"{one.pipeline}x{one.data}" for one in splits)),
        ("micro-batch of the best split", "Table II", "8, 4, 4, 2", _line(one.micro_batch for one in splits)),
        ("time with the published micro-batch over the best", "Table II", "1", second_best()),
        ("best split of 12 B, all states on the device", "V-B", "24x2, micro-batch 1", baseline()),
        ("pipeline of 12 B by G_inter, micro-batch 1", "Fig. 5", "24 over 6: 1.22", figure_5()),
        ("pipeline, 6x8 and 24x2", "Fig. 6", "34.05, 46.08 s",
         _line(f"{one.batch_seconds:.1f}" for one in (reused, kept)) + " s"),
        ("all-reduce, 6x8 and 24x2", "Fig. 6", "4.32, 0.62 s",
         _line(f"{one.sum_seconds:.2f}" for one in (reused, kept)) + " s"),
        ("step, 24x2 over 6x8", "Fig. 6", "1.13", f"{kept.seconds / reused.seconds:.2f}"),
        ("all-reduce over the optimizer, 6x8", "Fig. 6", "2.5",
         f"{reused.sum_seconds / _step(1, reused, sums=False).seconds:.2f}"),
        ("all-reduce with the optimizer by k", "Fig. 8", "best at 2 and 4; 1 worse than no overlap", figure_8()),
        ("states of a device at G_inter 6, without and with", "V-B", "40, 8.3 GB",
         f"{states['whole'] / 1e9:.1f}, {states['near'] / 1e9:.1f} GB"),
        ("bytes of all devices, 24x2, without and with", "V-B", "520, 130 GB: 4.0 times",
         f"{near:.0f}, {far:.0f} GB: {near / far:.1f} times"),
        ("share of the peak", "Fig. 10", "49.4 to 54.78 %",
         _line(f"{100 * of_peak(size, one.seconds):.1f}" for size, one in best.items()) + " %"),
        ("days of training", "Fig. 10", "not published as numbers",
         _line(f"{days(16384, one.seconds):.0f}" for one in best.values())),
        ("throughput over linear scaling, 12 B", "Fig. 11", "near perfect", strong()),
        ("layers between checkpoints", "V-A", "the factor of N / G_inter nearest to sqrt(N)", _line(gaps)),
    ]  # fmt: skip
    return [
        Row(what, f"Myelin {figure}", published, {"v100-8x6-edr": simulated})
        for what, figure, published, simulated in lines
    ]
