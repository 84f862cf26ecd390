# SPDX-License-Identifier: Apache-2.0
"""Makes records for `sluice trace` of passes that took the time that their schedules predict."""

from sluice.restore import SETS
from sluice.timeline import Schedule

COSTS = {
    **dict.fromkeys(("dispatch", "dispatch_grad", "redispatch"), 4e-3),
    **dict.fromkeys(("combine", "combine_grad"), 1e-3),
    **dict.fromkeys(("gemm1", "gemm2", "gemm1_grad", "gemm2_grad", "recompute"), 1e-3),
    **dict.fromkeys(("unpack", "unpack_grad", "activation", "activation_grad", "copy_out", "copy_in"), 2.5e-4),
    **dict.fromkeys(("reduce", "reduce_grad"), 1.25e-4),
    "weight_grad": 2e-3,
}
# Slow copies: with its own slot of T_ACT, a pass does not wait for them.
SLOW_COPIES = {**COSTS, **dict.fromkeys(("copy_out", "copy_in"), 6e-3)}
HEADER = 5e-4  # before the first op, and after the last


def events(schedule: Schedule, at: float, costs: dict = COSTS) -> list[dict]:
    """Returns the events that the engine records for a pass with the predicted times."""
    prediction = schedule.predict(costs)
    direction = schedule.data["direction"]
    place = {"layer": 3, "direction": direction, "bytes": 0}
    rows = [
        {"op": op["kind"], "lane": op["lane"], "chunk": op["chunk"], "begin_ns": begin, "end_ns": end, **place}
        for op, begin, end in zip(schedule.data["ops"], prediction.begin, prediction.end)
    ]
    for row in rows:
        row["begin_ns"], row["end_ns"] = (round((at + HEADER + row[key]) * 1e9) for key in ("begin_ns", "end_ns"))
    end = round((at + 2 * HEADER + prediction.seconds) * 1e9)
    whole = {"op": "pass", "lane": "compute", "chunk": -1, "begin_ns": round(at * 1e9), "end_ns": end, **place}
    return [*rows, whole]


def pair(policy: str, chunks: int = 4, **options) -> list[Schedule]:
    alike = {
        name: options[name] for name in ("under_plan", "chunks_by_experts", "gated", "deduplicate") if name in options
    }
    forward = Schedule.build("forward", chunks, *SETS[policy], **alike)
    return [forward, Schedule.build("backward", chunks, *SETS[policy], may_reuse_saved=True, **options)]


FACTS = {"gated": False, "model_width": 64, "hidden_width": 256, "dtype": "float32", "received_rows": 400}


EVENT = {"op": "gemm1", "lane": "compute", "chunk": 0, "layer": 0, "direction": "forward", "begin_ns": 1, "end_ns": 2}


def record(
    schedules: list[Schedule],
    rank: int = 0,
    late: float = 0.0,
    boot: str = "a",
    world: int = 2,
    facts: dict = FACTS,
    costs: dict = COSTS,
) -> dict:
    found = [event for place, one in enumerate(schedules) for event in events(one, 10 + place + late, costs)]
    context = {"ranks": list(range(world)), "layers": {"3": facts}, "events": found}
    return {"form": 2, "rank": rank, "world_size": world, "boot": boot, "contexts": [context]}
