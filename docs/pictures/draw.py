# SPDX-License-Identifier: Apache-2.0
"""The pictures of the manual, drawn by today's tools and then made small: pages show no tool tips, and boxes of one
colour are one path. recorded.json has the events that `sluice trace` and ./quickstart have recorded.

.venv/bin/python docs/pictures/draw.py                       draws all pictures
.venv/bin/python docs/pictures/draw.py quickstart FOLDER     first takes the newest events from quickstart_out
.venv/bin/python docs/pictures/draw.py trace FOLDER          first takes the newest events from trace_out

For trace.svg: sluice trace --out trace_out --steps 8 -- torchrun --nproc-per-node 2 \\
               python_plugin/sluice/test/layers_rank.py 14 256 2 4 S4 -
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from sluice import timeline
from sluice.restore import SETS
from sluice.tracing import report

HERE = Path(__file__).resolve().parent
RECORDED = HERE / "recorded.json"
STEPS = 3  # of the trace's recording that are kept: the picture has the median one

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


def schedules(recorded: dict[str, Any]) -> str:
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


def quickstart(recorded: dict[str, Any]) -> str:
    """As ./quickstart draws its events."""
    place = HERE.parents[1] / "examples" / "text_lm" / "quickstart.py"
    spec = importlib.util.spec_from_file_location("quickstart", place)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    of = recorded["quickstart"]
    return timeline.svg([tool.panel(side, rows(of[side])) for side in ("stock", "sluice")], of["title"], timeline.by_op)


def trace(recorded: dict[str, Any]) -> str:
    """As `sluice trace` draws a recording."""
    rank = json.loads(json.dumps(recorded["trace"]))
    for context in rank["contexts"]:
        context["events"] = rows(context["events"])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "rank0.json").write_text(json.dumps(rank))
        passes = report.newest(report.read(folder)[0], STEPS)
        report.write(folder, passes, {"steps": STEPS})
        return (Path(folder) / "timeline.svg").read_text()


PICTURES = {"schedules.svg": schedules, "quickstart.svg": quickstart, "trace.svg": trace}


def table(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Events as rows with one list of names; times count from the first."""
    start = min(event["begin_ns"] for event in events)
    for event in events:
        event["begin_ns"], event["end_ns"] = event["begin_ns"] - start, event["end_ns"] - start
    return {"names": list(events[0]), "rows": [list(event.values()) for event in events]}


def rows(of: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a table."""
    return [dict(zip(of["names"], row, strict=True)) for row in of["rows"]]


def newest_quickstart(folder: Path) -> dict[str, Any]:
    """Of the folder that ./quickstart writes: the events of both sides, from the Perfetto trace."""
    result = json.loads((folder / "result.json").read_text())
    sides: dict[str, list[dict[str, Any]]] = {"stock": [], "sluice": []}
    for event in json.loads((folder / "trace.json").read_text())["traceEvents"]:
        if event["ph"] == "X":
            begin = round(1e3 * event["ts"])
            sides[list(sides)[event["pid"] // 1000]].append(
                {key: event["args"][key] for key in ("op", "chunk", "layer")}
                | {"direction": event["cat"], "rank": event["pid"] % 1000}
                | {"begin_ns": begin, "end_ns": begin + round(1e3 * event["dur"])}
            )
    title = f"MoE operations of one training step, {result['ranks']} ranks, link {result['link']}"
    return {"title": title, **{side: table(events) for side, events in sides.items()}}


def newest_trace(folder: Path) -> dict[str, Any]:
    """Of the folder that `sluice trace` writes: rank 0's last steps of the layer that takes longest."""
    rank = json.loads(next(folder.glob("rank0*.json")).read_text()) | {"boot": "recorded"}
    by_rank, _ = report.read(folder)
    (longest, *_) = report.panels(report.newest(by_rank, STEPS))
    layer = longest.events[0].layer
    for context in rank["contexts"]:
        mine = [event for event in context["events"] if event["layer"] == layer]
        begins = sorted(e["begin_ns"] for e in mine if e["op"] == "pass" and e["direction"] == "forward")
        context["events"] = table([event for event in mine if event["begin_ns"] >= begins[-STEPS]])
    return rank


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
    return "\n".join([*lines, "</svg>", ""])


def text_of(recorded: dict[str, Any]) -> str:
    lines = [f"{json.dumps(name)}: {json.dumps(recorded[name], sort_keys=True)}" for name in sorted(recorded)]
    return "{" + ",\n".join(lines) + "}\n"


def drawn() -> dict[str, str]:
    """All pictures by name, as this version draws them."""
    recorded = json.loads(RECORDED.read_text())
    return {name: small(draw(recorded)) for name, draw in PICTURES.items()}


def main(words: list[str]) -> None:
    """Take new events, if a recording is named, and draw all pictures."""
    if words:
        name, folder = words
        newest = {"quickstart": newest_quickstart, "trace": newest_trace}[name](Path(folder))
        recorded = (json.loads(RECORDED.read_text()) if RECORDED.exists() else {}) | {name: newest}
        RECORDED.write_text(text_of(recorded))
    for name, picture in drawn().items():
        (HERE / name).write_text(picture)


if __name__ == "__main__":
    main(sys.argv[1:])
