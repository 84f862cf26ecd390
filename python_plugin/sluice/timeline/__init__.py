# SPDX-License-Identifier: Apache-2.0
"""Draws timelines of passes, predicted by the schedule and recorded, as SVG, PNG and Perfetto JSON.

    schedule = Schedule.build("forward", chunks=4, restore_input="redispatch", restore_pre_activation="recompute")
    prediction = schedule.predict({"dispatch": 2e-3, "gemm1": 3e-3, "gemm2": 3e-3, "combine": 2e-3})
    write([prediction.panel("predicted"), Panel("measured", events)], "out", "one layer")

Only PNG needs a third-party package, `resvg-py`. Without it the PNG is left out.
"""

from .files import PngUnavailable, perfetto, write, write_png
from .model import LANES, Event, Panel, from_trace
from .schedule import Prediction, Schedule
from .slots import Hold, bytes_over_time, occupancy, tensor_bytes
from .svg import by_chunk, by_op, svg

__all__ = [
    "LANES",
    "Event",
    "Hold",
    "Panel",
    "PngUnavailable",
    "Prediction",
    "Schedule",
    "by_chunk",
    "by_op",
    "bytes_over_time",
    "from_trace",
    "occupancy",
    "perfetto",
    "svg",
    "tensor_bytes",
    "write",
    "write_png",
]
