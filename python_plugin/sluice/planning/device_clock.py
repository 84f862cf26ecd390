# SPDX-License-Identifier: Apache-2.0
"""Simulates recorded CUDA calls of all ranks in virtual time: hosts, streams, events, NCCL groups, shared SMs.

The records are those of capi/dry_step (format: backend/device/cuda/fake/fake_record.h), priced for one device. The
result is a model, not a measurement.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .device_prices import Prices
from .errors import BadInput

GEMMS, LINK, COPIES = "GEMMs", "link", "copies"
LEAST = 1e-12  # seconds: tolerance for rounding


@dataclass
class Work:
    """Describes a kernel, copy or NCCL group on a stream. seconds: when it runs alone; share: of the SMs that it can
    fill; block: seconds of one of its blocks, which keeps its SM until it ends."""

    kind: str
    seconds: float
    share: float = 1.0
    block: float = 0.0
    group: tuple[int, int] | None = None  # of an NCCL group: communicator, number
    left: float = 0.0
    ahead_at: float = 0.0  # when blocks of lower priority that ran at its start have ended


@dataclass
class Stream:
    """queue: works and ("record" | "wait", ticket), in order; running: the first work has begun; priority: the lowest
    number comes first, as in CUDA."""

    queue: deque[Any] = field(default_factory=deque)
    running: bool = False
    priority: int = 0


@dataclass
class Rank:
    """events: calls that the host has not made yet; at: the host's time; blocked: what the host waits for."""

    events: deque[Any]
    at: float = 0.0
    pending: Any = None
    blocked: Any = None
    streams: dict[int, Stream] = field(default_factory=dict)
    tickets: frozenset[int] = frozenset()  # events that this rank records
    headers: int = 0  # header exchanges that the host has reached
    done: dict[int, float] = field(default_factory=dict)  # when each ticket was recorded
    alone: dict[str, float] = field(default_factory=dict)  # seconds of works that run alone, by kind
    busy: float = 0.0  # seconds with any work
    filled: float = 0.0  # seconds times the share of the SMs in use
    finished: float = 0.0


@dataclass(frozen=True)
class Result:
    """seconds: until all ranks have finished."""

    seconds: float
    ranks: Sequence[Rank]


def kernel(prices: Prices, name: str, units: int, length: int, moved: int) -> Work:
    """Prices a kernel as the longest of: a launch, its bytes, its instructions, and a warp's steps times its turns."""
    general, price, sms = prices.data["kernel"], prices.kernel(name), prices.data["sms"]
    steps = math.ceil(length / price["elements"])
    turns = math.ceil(units / (sms * price["warps_per_sm"]))
    seconds = max(
        general["least_seconds"],
        moved / general["bytes_per_second"],
        units * steps * price["instructions"] / general["issue_per_second"],
        turns * steps * price["step_seconds"],
    )
    blocks = math.ceil(units / 8)
    return Work(price["kind"], seconds, min(1.0, blocks / sms), seconds / max(1, turns))


def gemms(
    prices: Prices, entry: str, bytes_ab: int, bytes_c: int, problems: Iterable[Sequence[int]], told: int = 0
) -> Work:
    """Prices a call of cuBLAS: the tiles of all its GEMMs, in waves of one tile per SM.

    told: the number of SMs that cuBLAS may use; 0: all. cuBLAS chooses the tiles that end first on that many SMs.
    """
    price, all_sms = prices.data["gemm"], prices.data["sms"]
    sms = told or all_sms
    of_entry, best = price[entry], None
    moved = 0
    listed = [tuple(problem) for problem in problems]
    for m, n, k in listed:
        moved += (m * k + k * n) * bytes_ab + m * n * bytes_c
    for rows, columns, share in of_entry["tiles"]:
        rate = of_entry["flops_per_second"] * share / all_sms
        tiles, total, longest = 0, 0.0, 0.0
        for m, n, k in listed:
            # cuBLAS may transpose its tiles.
            count = min(
                math.ceil(m / rows) * math.ceil(n / columns),
                math.ceil(m / columns) * math.ceil(n / rows),
            )
            one = 2 * rows * columns * k / rate + of_entry["tile_seconds"]
            tiles, total, longest = tiles + count, total + count * one, max(longest, one)
        whole = len(listed) == 1
        seconds = math.ceil(tiles / sms) * longest if whole else max(total / sms + longest / 2, longest)
        if best is None or seconds < best[0]:
            best = (seconds, min(sms, tiles) / all_sms, longest)
    if best is None:
        raise BadInput(f"a GEMM by {entry} has no tiles")
    return Work(GEMMS, price["call_seconds"] + max(best[0], moved / price["bytes_per_second"]), *best[1:])


class Clock:
    """Advances the virtual time of all ranks. All streams are idle at the start."""

    def __init__(self, prices: Prices, events: Sequence[Sequence[Any]]) -> None:
        self.prices, self.now = prices, 0.0
        self.host = prices.data["host"]
        count = 1 + max((event[1] for event in events), default=0)
        self.ranks = []
        for rank in range(count):
            own = [event for event in events if event[1] == rank]
            tickets = frozenset(event[3] for event in own if event[0] == "record")
            self.ranks.append(Rank(deque(own), tickets=tickets))
        self.groups: dict[tuple[int, int], dict[int, Sequence[Sequence[int]]]] = {}
        for event in events:
            if event[0] == "messages":
                self.groups.setdefault((event[3], event[4]), {})[event[1]] = event[5]
        self.group_seconds = {key: self._seconds_of(members) for key, members in self.groups.items()}
        self.members = {
            key: {*ranks, *(part[0] for parts in ranks.values() for part in parts)}
            for key, ranks in self.groups.items()
        }
        self.header_at: dict[int, float] = {}  # when the last host has reached the exchange
        self.open: dict[tuple[int, int], set[int]] = {}  # ranks that have reached a group
        self.ended: dict[tuple[int, int], int] = {}  # (communicator, rank): number of the next group
        for comm, number in sorted(self.groups, reverse=True):
            for rank in self.groups[comm, number]:
                self.ended[comm, rank] = number

    def _seconds_of(self, members: dict[int, Sequence[Sequence[int]]]) -> float:
        link = self.prices.data["link"]
        most = max(max(sum(p[1] for p in parts), sum(p[2] for p in parts)) for parts in members.values())
        return float(link["start_seconds"] + most / link["bytes_per_second"])

    def run(self) -> Result:
        """Runs until every host has made its calls and every stream is empty."""
        while True:
            while any([self._host(rank) or self._streams(i, rank) for i, rank in enumerate(self.ranks)]):
                pass
            step = self._next()
            if step is None:
                break
            self._advance(step)
        stuck = [
            i
            for i, rank in enumerate(self.ranks)
            if rank.events or rank.blocked is not None or any(s.queue for s in rank.streams.values())
        ]
        if stuck:
            raise BadInput(f"the record does not end: ranks {stuck} wait for events that no rank produces")
        return Result(max(max(rank.at, rank.finished) for rank in self.ranks), self.ranks)

    # ---- hosts

    def _host(self, rank: Rank) -> bool:
        """Makes the calls that are due. Returns whether there were any."""
        moved = False
        while True:
            if rank.blocked is not None:
                if not self._unblock(rank):
                    return moved
                moved = True
            if rank.pending is not None:
                if rank.at > self.now + LEAST:
                    return moved
                self._call(rank, rank.pending)
                rank.pending, moved = None, True
                continue
            if not rank.events:
                return moved
            rank.pending = rank.events.popleft()
            rank.at = max(rank.at, self.now) + self._cost(rank.pending)

    def _cost(self, event: Sequence[Any]) -> float:
        kind = event[0]
        if kind == "gemm":
            return float(self.host[event[3]])
        if kind == "host_call":
            return float(self.host["call"])
        if kind in ("mark", "priority", "host_wait", "host_drain", "header"):
            return 0.0
        if kind == "messages":
            return float(self.host["messages"] + event[6] * self.host["message"])
        return float(self.host[kind])

    def _call(self, rank: Rank, event: Sequence[Any]) -> None:
        """Completes a host call: blocks the host, or appends to the stream."""
        kind = event[0]
        if kind in ("mark", "host_call"):
            return
        if kind == "priority":
            rank.streams.setdefault(event[2], Stream()).priority = event[3]
            return
        if kind == "header":
            rank.headers += 1
            rank.blocked = ("header", rank.headers, "header", rank.at)
            self.header_at[rank.headers] = max(rank.at, self.header_at.get(rank.headers, 0.0))
            return
        if kind == "host_wait":
            rank.blocked = ("ticket", event[2], event[3], rank.at)
            return
        stream = rank.streams.setdefault(event[2], Stream())
        if kind == "host_drain":
            rank.blocked = ("stream", event[2], "drain", rank.at)
        elif kind in ("record", "wait"):
            stream.queue.append((kind, event[3]))
        else:
            stream.queue.append(self._work(event))

    def _unblock(self, rank: Rank) -> bool:
        what, which, how, since = rank.blocked
        if what == "ticket":
            if not self._has_passed(rank, which):
                return False
            ready = rank.done.get(which, 0.0)
        elif what == "header":
            if any(other.headers < which for other in self.ranks):
                return False
            ready = self.header_at[which]
        else:
            if rank.streams[which].queue:
                return False
            ready = self.now
        seen = max(ready, since)
        if how == "query" and ready > since:
            period = self.host["query_period"]  # the host sleeps between two queries
            seen = since + math.ceil((ready - since) / period) * period
        rank.at = seen + self.host[how]
        rank.blocked = None
        return True

    def _work(self, event: Sequence[Any]) -> Work:
        kind, copy = event[0], self.prices.data["copy"]
        if kind == "launch":
            work = kernel(self.prices, event[3], event[4], event[5], event[6] + event[7])
        elif kind == "gemm":
            work = gemms(self.prices, event[3], event[4], event[5], event[6], event[7])
        elif kind == "messages":
            key = (event[3], event[4])
            share = self.prices.data["link"]["sms"] / self.prices.data["sms"]
            work = Work(LINK, self.group_seconds[key], share, group=key)
        elif kind == "copy":
            work = Work(COPIES, copy["least_seconds"] + event[4] / copy[event[3]], 0.0)
        elif kind == "fill":
            work = Work(COPIES, copy["least_seconds"] + event[3] / copy["fill"], 0.0)
        else:
            raise BadInput(f"the record has a call {kind!r} that this clock does not know")
        work.left = work.seconds
        return work

    # ---- streams

    def _streams(self, index: int, rank: Rank) -> bool:
        """Starts works that can start and processes records and waits. Returns whether there was progress."""
        moved = False
        for stream in rank.streams.values():
            while stream.queue and not stream.running:
                head = stream.queue[0]
                if isinstance(head, Work):
                    if not self._may_begin(index, head):
                        break
                    lower = [w.block for s, w in self._running(rank) if s.priority > stream.priority]
                    head.ahead_at = self.now + max(lower, default=0.0)
                    stream.running = moved = True
                    continue
                if head[0] == "wait" and not self._has_passed(rank, head[1]):
                    break
                if head[0] == "record":
                    rank.done[head[1]] = self.now
                stream.queue.popleft()
                moved = True
        return moved

    def _has_passed(self, rank: Rank, ticket: int) -> bool:
        """Returns whether the ticket was recorded. Tickets that this rank does not record were recorded earlier."""
        return ticket in rank.done or ticket not in rank.tickets

    def _may_begin(self, index: int, work: Work) -> bool:
        """Returns whether a work may start: an NCCL group waits for all its ranks and its communicator's last group."""
        if work.group is None:
            return True
        comm, number = work.group
        if self.ended[comm, index] != number:
            return False
        here = self.open.setdefault(work.group, set())
        here.add(index)
        return here == self.members[work.group]

    def _running(self, rank: Rank) -> list[tuple[Stream, Work]]:
        return [(stream, stream.queue[0]) for stream in rank.streams.values() if stream.running]

    def _rates(self, running: list[tuple[Stream, Work]]) -> list[float]:
        """Returns the speed of each work, as concurrent works share the SMs. 1: as if it ran alone.

        A GPU gives an SM that becomes free to a block of the stream of highest priority, and interrupts no block. So a
        work takes its share before works of lower priority do, once blocks that ran at its start have ended. Until
        then, it shares with them.
        """
        last = max((stream.priority for stream, _ in running), default=0)
        levels = [stream.priority if work.ahead_at <= self.now + LEAST else last for stream, work in running]
        free, rate_of = 1.0, {}
        for level in sorted(set(levels)):
            wanted = sum(work.share for (_, work), own in zip(running, levels) if own == level)
            rate_of[level] = min(1.0, free / wanted) if wanted > 0 else 1.0
            free = max(0.0, free - wanted)
        return [rate_of[level] for level in levels]

    def _next(self) -> float | None:
        """Returns the seconds until the next event. None: there is none."""
        times = []
        for rank in self.ranks:
            if rank.pending is not None and rank.blocked is None:
                times.append(rank.at - self.now)
            running = self._running(rank)
            rates = self._rates(running)
            times += [work.left / rate for (_, work), rate in zip(running, rates) if rate > 0]
            times += [work.ahead_at - self.now for _, work in running if work.ahead_at > self.now + LEAST]
        return max(0.0, min(times)) if times else None

    def _advance(self, step: float) -> None:
        rates_of = [self._rates(self._running(rank)) for rank in self.ranks]
        self.now += step
        for index, rank in enumerate(self.ranks):
            running = self._running(rank)
            if not running:
                continue
            rank.busy += step
            rank.filled += step * min(1.0, sum(work.share for _, work in running))
            for (stream, work), rate in zip(running, rates_of[index]):
                work.left -= step * rate
                if work.left > LEAST:
                    continue
                stream.queue.popleft()
                stream.running = False
                rank.finished = self.now
                rank.alone[work.kind] = rank.alone.get(work.kind, 0.0) + work.seconds
                if work.group is not None:
                    self._end_group(index, work.group)

    def _end_group(self, index: int, group: tuple[int, int]) -> None:
        comm, number = group
        later = [n for c, n in self.groups if c == comm and n > number and index in self.groups[c, n]]
        self.ended[comm, index] = min(later, default=-1)
