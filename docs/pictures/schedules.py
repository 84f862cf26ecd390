"""Draws docs/pictures/schedules.svg: .venv/bin/python docs/pictures/schedules.py"""

from pathlib import Path

from sluice import timeline
from sluice.restore import SETS

# One chunk of 2048 rows, M 1024, H 4096, bf16: made-up seconds with communication about as long as computation.
EXCHANGE, PACK, PRODUCT, ACTIVATION, COPY = 2e-3, 0.15e-3, 1.5e-3, 0.2e-3, 1.2e-3
SECONDS = {
    **dict.fromkeys(("dispatch", "dispatch_grad", "redispatch", "combine", "combine_grad"), EXCHANGE),
    **dict.fromkeys(("unpack", "unpack_grad", "reduce", "reduce_grad"), PACK),
    **dict.fromkeys(("gemm1", "gemm2", "gemm1_grad", "gemm2_grad", "recompute"), PRODUCT),
    **dict.fromkeys(("activation", "activation_grad"), ACTIVATION),
    **dict.fromkeys(("copy_out", "copy_in"), COPY),
    "weight_grad": 2 * PRODUCT,
}


def picture() -> str:
    """S1 and S4, forward and backward, n = 4."""
    panels = []
    for name in ("S1", "S4"):
        for direction in ("forward", "backward"):
            options = {"wgrad": "per_chunk", "under_plan": True}
            if direction == "backward":
                options["may_reuse_saved"] = True
            prediction = timeline.Schedule.build(direction, 4, *SETS[name], **options).predict(SECONDS)
            title = f"{name} {direction}: {prediction.seconds * 1e3:.1f} ms predicted"
            panels.append(prediction.panel(title, timeline.tensor_bytes(2048, 1024, 4096, 2)))
    return timeline.svg(panels, "One layer, n = 4: schedules S1 and S4, predicted")


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture())
