# SPDX-License-Identifier: Apache-2.0
"""Draws a plan of stages as SVG: for each stage its layers, as wide as their seconds and coloured by policy, and below
them its bytes and its budget."""

from __future__ import annotations

from collections.abc import Sequence

from ..timeline import colours
from ..timeline.shapes import document, legend, rect, text
from .planner import size
from .stages import Choice, Layer, Plan, Problem

WIDTH, LEFT, RIGHT, ROW, BAR, GAP = 1100, 96, 150, 22, 14, 14


def svg(problem: Problem, plan: Plan, title: Sequence[str]) -> str:
    """Returns the picture, also for a plan that does not fit. title: lines."""
    body, y = drawn(problem, plan, title)
    return document(WIDTH, y, body)


def drawn(problem: Problem, plan: Plan, title: Sequence[str]) -> tuple[list[str], float]:
    """Returns the elements of the picture and the y coordinate below them, so that a caller can draw more."""
    room = WIDTH - LEFT - RIGHT
    widths = [_seconds(layer, choice) for layer, choice in zip(problem.layers, plan.choices)]
    members = [[i for i, choice in enumerate(plan.choices) if choice.stage == s] for s in range(len(plan.stages))]
    rows = zip(members, plan.stages)
    longest = max((max(stage["seconds"], sum(widths[i] for i in own)) for own, stage in rows), default=0.0) or 1e-9
    most = max(max(stage["bytes"], stage["budget_bytes"]) for stage in plan.stages) or 1
    body = [text(12, 24 + 20 * i, line, 14, weight="bold") for i, line in enumerate(title)]
    y = 24.0 + 20 * len(title)
    for number, (own, stage) in enumerate(zip(members, plan.stages)):
        body.append(text(LEFT - 8, y + 15, f"stage {number}", 12, "end"))
        x = float(LEFT)
        for i in own:
            x = _layer(body, x, y, widths[i] / longest * room, f"{i} {problem.layers[i].name}", plan.choices[i])
        body.append(text(LEFT + room + 8, y + 15, f"{stage['seconds'] * 1e3:.3f} ms", 11))
        y += ROW
        y = _links(body, y, stage, room / longest)
        y = _bytes(body, y, stage, room / most) + GAP
    kinds = list(dict.fromkeys(map(_kind, plan.choices)))
    y = legend(body, [colours.POLICIES[kind] for kind in kinds], LEFT, WIDTH, y)
    parts = [mark for name, mark in colours.PARTS.items() if any(s[f"{name}_bytes"] for s in plan.stages)]
    y = legend(body, parts, LEFT, WIDTH, y)
    body.append(text(LEFT, y + 10, "layers: seconds of a micro-batch, forward and backward; red line: the budget", 11))
    return body, y + 24


def _seconds(layer: Layer, choice: Choice) -> float:
    if layer.options:
        option = layer.options[choice.option]
        return option.forward_seconds + option.backward_seconds
    seconds = layer.forward_seconds + layer.backward_seconds
    if choice.moe is not None:
        return seconds + choice.moe.seconds
    return seconds + (layer.recompute_seconds if choice.kind == "recompute" else 0.0)


def _kind(choice: Choice) -> str:
    return "MoE" if choice.moe is not None else choice.kind


def _layer(body: list[str], x: float, y: float, width: float, name: str, choice: Choice) -> float:
    tip = f"layer {name}: {choice.policy}; {choice.reason}"
    edge = f' stroke="{colours.PAPER}" stroke-width="0.5"'
    body.append(rect(x, y, max(width, 0.5), ROW - 2, colours.POLICIES[_kind(choice)].colour, edge, tip))
    if width > 6.5 * len(name) + 4:
        body.append(text(x + width / 2, y + 14, name, 10, "middle"))
    return x + width


def _links(body: list[str], y: float, stage: dict, scale: float) -> float:
    """Draws thin bars for the seconds in which the stage's links and copies are busy. Returns the new y."""
    for name, colour in (("message", colours.PARTS["message"].colour), ("copy", colours.COPIES.colour)):
        seconds = stage[f"{name}_seconds"]
        if seconds > 0:
            tip = f"{name}: {seconds * 1e3:.3f} ms"
            body.append(rect(LEFT, y, seconds * scale, 3, colour, "", tip))
            y += 4
    return y


def _bytes(body: list[str], y: float, stage: dict, scale: float) -> float:
    body.append(text(LEFT - 8, y + 11, "bytes", 10, "end"))
    x = float(LEFT)
    for name, (colour, words) in colours.PARTS.items():
        value = stage[f"{name}_bytes"]
        if value:
            body.append(rect(x, y, value * scale, BAR - 2, colour, "", f"{words}: {size(value)}"))
        x += value * scale
    said, budget = size(stage["bytes"]), stage["budget_bytes"]
    if budget:
        line = LEFT + budget * scale
        place = f'x1="{line:.1f}" x2="{line:.1f}" y1="{y - 2:.1f}" y2="{y + BAR:.1f}"'
        body.append(f'<line {place} stroke="{colours.LIMIT}"/>')
        said += f" of {size(budget)}"
    body.append(text(WIDTH - RIGHT + 8, y + 11, said, 11))
    return y + BAR
