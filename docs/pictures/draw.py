# SPDX-License-Identifier: Apache-2.0
"""The pictures of the manual, small: pages show no tool tips, and boxes of one colour are one path.

.venv/bin/python docs/pictures/draw.py             draws schedules.svg
.venv/bin/python docs/pictures/draw.py NAME.svg    makes small what `sluice trace` or ./quickstart has drawn
"""

import re
import sys
import textwrap
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


def small(svg: str) -> str:
    """The same picture; boxes and texts that share their attributes are grouped, boxes below and texts above."""
    head, *rest = svg.strip().removesuffix("</svg>").split("\n<")
    boxes: dict[str, list[str]] = {}
    texts: dict[str, list[str]] = {}
    others: list[str] = []
    for element in rest:
        box = re.match(r'rect x="(.*?)" y="(.*?)" width="(.*?)" height="(.*?)" (.*?)/?>', element)
        text = re.match(r'text (x=".*?" y=".*?") (.*?)>(.*)</text>', element)
        if box:
            x, y, width, height = (f"{float(each):g}" for each in box.groups()[:4])
            boxes.setdefault(box[5], []).append(f"M{x} {y}h{width}v{height}h-{width}z")
        elif text:
            texts.setdefault(text[2], []).append(f"<tspan {text[1]}>{text[3]}</tspan>")
        else:
            others.append("<" + element.strip())
    lines = [head, others.pop(0)]  # what fills the background
    for style, among in boxes.items():
        lines.append(f'<path {style} d="{" ".join(among)}"/>')
    lines += others
    for style, among in texts.items():
        lines.append(f"<text {style}>{''.join(among)}</text>")
    return "\n".join([*(textwrap.fill(line, 120, break_on_hyphens=False) for line in lines), "</svg>", ""])


if __name__ == "__main__":
    here = Path(__file__).parent
    for name in sys.argv[1:] or ["schedules.svg"]:
        drawn = (here / name).read_text() if sys.argv[1:] else picture()
        (here / name).write_text(small(drawn))
