# SPDX-License-Identifier: Apache-2.0
"""Measures the memory that a forward and backward allocate from torch: live bytes at named marks, peaks between them.

The numbers come from the profiler's memory events, so that they include temporaries inside of operators. A process has
one meter at a time, because it has one profiler.
"""

from __future__ import annotations

import bisect
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler import profile, record_function

from ...errors import Busy

_PREFIX = "sluice:"
_START = "start"
_NOTES = (b"USDT:", b"STAGE:", b"INFO:")  # levels of the profiler's log


def mark(name: str) -> None:
    """Sets a mark in the measurement that runs now."""
    with record_function(_PREFIX + name):
        pass


class Timeline:
    """Has live bytes over time, minus those at the start. Marks have names; the first mark of a name counts."""

    def __init__(self, changes: list[tuple[int, int]], marks: dict[str, int]) -> None:
        self._marks = marks
        self._times, self._live, now = [], [], 0
        for when, bytes_ in sorted(changes, key=lambda change: change[0]):
            now += bytes_
            self._times.append(when)
            self._live.append(now)
        before = bisect.bisect_right(self._times, marks[_START])
        self._base = self._live[before - 1] if before else 0

    def __contains__(self, name: str) -> bool:
        return name in self._marks

    def live(self, name: str) -> int:
        """Returns live bytes at a mark."""
        return self._at(self._place(name))

    def peak(self, first: str, last: str) -> int:
        """Returns the most live bytes from one mark to a later one."""
        a, b = self._place(first), self._place(last)
        return max([self._at(a), *(live - self._base for live in self._live[a:b])])

    def _place(self, name: str) -> int:
        """Returns the number of changes before the mark."""
        return bisect.bisect_right(self._times, self._marks[name])

    def _at(self, place: int) -> int:
        return (self._live[place - 1] if place else 0) - self._base


def measure(run: Callable[[], Any]) -> Timeline:
    """Calls `run` between the marks "start" and "end"; `run` may set further marks.

    Raises Busy if a profiler runs already.
    """
    if torch.autograd.profiler._is_profiler_enabled:
        raise Busy("a torch profiler is running already, but measuring memory starts its own: stop it first")
    profiler = profile(profile_memory=True)
    with _without_notes():
        profiler.__enter__()
    try:
        mark(_START)
        run()
        mark("end")
    finally:
        with _without_notes():
            profiler.__exit__(None, None, None)
    return _timeline(profiler)


def _timeline(profiler: profile) -> Timeline:
    changes, marks = [], {}
    for event in profiler.kineto_results.events():
        if event.name() == "[memory]" and event.device_type() == DeviceType.CPU:
            changes.append((event.start_ns(), event.nbytes()))
        elif event.name().startswith(_PREFIX):
            marks.setdefault(event.name()[len(_PREFIX) :], event.start_ns())
    return Timeline(changes, marks)


@contextmanager
def _without_notes() -> Iterator[None]:
    """Hides the notes that the profiler's library writes to stderr at its start and stop; other lines are passed on."""
    try:
        sys.stderr.flush()
        there = os.dup(2)
    except (AttributeError, OSError, ValueError):  # there is no stderr
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(there, 2)
            os.close(there)
            held.seek(0)
            for line in held:
                if not line.startswith(_NOTES):
                    os.write(2, line)
