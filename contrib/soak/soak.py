# SPDX-License-Identifier: Apache-2.0
"""Kills and stops ranks of a C program over TCP at random instants, and checks that training continues.

    .venv/bin/python contrib/soak/soak.py [--minutes 5] [--ranks 3] [--seed N]

In each turn the ranks create new communicators, load the last weights that all of them have, and train; then one rank
is killed, or stopped for a moment, or stopped beyond the deadline, or nothing happens. Survivors are never restarted:
they release everything and join the next turn. The soak fails if a rank returns no status in time, if the ranks do not
wait for a rank that was stopped for a moment, if a loss differs in any bit from an undisturbed run, or if a survivor's
descriptors, threads or memory grow. The last line counts turns, events and statuses.
"""

import argparse
import contextlib
import os
import random
import re
import selectors
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 6.0
SLACK_S = 30.0  # on a busy machine, in addition to the deadlines of joining, connecting and one exchange
SHORT_S = 1.0  # the longest stop that the other ranks must tolerate
EVENTS = {"kill": 60, "short stop": 20, "long stop": 12, "none": 8}
GROWTH_KB = 1024  # the allowed growth of a survivor's memory over all turns


class Broken(AssertionError):
    """Reports a violated property of a soak test."""


class Rank:
    """Runs the process of a rank, and keeps its pending output and its resources after each turn."""

    def __init__(self, program: Path, folder: Path, rank: int, world: int) -> None:
        ours, theirs = socket.socketpair()
        self.control, self.rank, self.pending = ours, rank, b""
        self.held: list[tuple[int, int, int]] = []  # descriptors, threads, KiB
        command = [str(program), str(theirs.fileno()), str(folder), str(rank), str(world), str(int(DEADLINE_S * 1000))]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=(theirs.fileno(),))
        theirs.close()

    def order(self, turn: int, first_step: int, steps: int, world: int, streams: list[socket.socket]) -> None:
        words = struct.pack("=iiii", turn, first_step, steps, world)
        socket.send_fds(self.control, [words], [stream.fileno() for stream in streams])

    def memory(self) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", text)[1])

    def end(self) -> None:
        self.control.close()
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()


class Soak:
    """Runs all ranks, turn after turn."""

    def __init__(self, program: Path, folder: Path, world: int, seed: int) -> None:
        self.program, self.folder, self.world = program, folder, world
        self.random = random.Random(seed)
        self.ranks = [Rank(program, folder, rank, world) for rank in range(world)]
        self.turn = 0
        self.losses: dict[tuple[int, int], str] = {}
        self.must_know = False  # whether `losses` has all losses, of the undisturbed run
        self.done: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.longest_s = 0.0

    def first_step(self) -> int:
        """Returns the last step whose weights all ranks have saved, and removes older weights."""
        found: list[set[int]] = [set() for _ in range(self.world)]
        for path in self.folder.glob("weights-*-*"):
            match = re.fullmatch(r"weights-(\d+)-(\d+)", path.name)
            if match:
                found[int(match[1])].add(int(match[2]))
        last = max(set.intersection(*found), default=0)
        for rank, steps in enumerate(found):
            for step in steps:
                if step < last:
                    (self.folder / f"weights-{rank}-{step}").unlink()
        return last

    def begin(self, first_step: int, steps: int) -> None:
        self.turn += 1
        streams: list[list[socket.socket]] = [[] for _ in range(self.world)]
        for low in range(self.world):
            for high in range(low + 1, self.world):
                one, other = socket.socketpair()
                streams[low].append(one)
                streams[high].append(other)
        # A rank's streams are in the order of its peers' ranks.
        for rank in self.ranks:
            rank.order(self.turn, first_step, steps, self.world, streams[rank.rank])
        for stream in (stream for some in streams for stream in some):
            stream.close()

    def listen(self, ranks: list[Rank], until: float, is_enough) -> None:
        """Reads output until each of these ranks has printed a line with `is_enough(line)`. Fails at time `until`."""
        left = {rank.rank: rank for rank in ranks}
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                selector.register(rank.process.stdout, selectors.EVENT_READ, rank)
            while left and time.monotonic() < until:
                for key, _ in selector.select(max(0.0, until - time.monotonic())):
                    if self._read(key.data, is_enough):
                        left.pop(key.data.rank, None)
                        selector.unregister(key.fileobj)
        if left:
            raise Broken(f"turn {self.turn}: ranks {sorted(left)} have no status in time")

    def _read(self, rank: Rank, is_enough) -> bool:
        data = os.read(rank.process.stdout.fileno(), 1 << 16)
        if not data:
            raise Broken(f"turn {self.turn}: rank {rank.rank} ended by itself: {rank.process.wait()}")
        *lines, rank.pending = (rank.pending + data).split(b"\n")
        return any([self._take(rank, line.decode()) and is_enough(line.decode()) for line in lines])

    def _take(self, rank: Rank, line: str) -> bool:
        """Checks and records a line. Returns whether the line belongs to this turn."""
        word, turn, *rest = line.split(maxsplit=3)
        if int(turn) != self.turn:
            return False
        if word == "step":
            at, loss = (rank.rank, int(rest[0])), rest[1]
            if self.losses.get(at, None if self.must_know else loss) != loss:
                raise Broken(f"turn {self.turn}: loss of rank {at[0]} in step {at[1]} is {loss}, not {self.losses[at]}")
            self.losses[at] = loss
            self.done["steps"] += 1
        if word == "end":
            status = rest[0]
            peer, ms, descriptors, threads = (int(number) for number in rest[1].split()[:4])
            self.statuses[status] += 1
            self.longest_s = max(self.longest_s, ms / 1000)
            rank.held.append((descriptors, threads, rank.memory()))
            rank.status, rank.message = status, rest[1]
            if ms / 1000 > DEADLINE_S + SLACK_S:
                raise Broken(f"turn {self.turn}: rank {rank.rank} had {status} after {ms} ms only (peer {peer})")
        return True

    def undisturbed(self, steps: int) -> None:
        """Runs one turn without events, and records the losses that all later turns must have."""
        self.begin(0, steps)
        self.listen(self.ranks, time.monotonic() + 300, _is_end)
        if self.statuses != {"OK": self.world}:
            raise Broken(f"nobody was disturbed, and statuses are {self.statuses}")
        for path in self.folder.glob("weights-*"):
            path.unlink()
        self.must_know = True

    def disturbed(self, steps: int) -> None:
        """Runs one turn with a random event."""
        what = self.random.choices(list(EVENTS), list(EVENTS.values()))[0]
        first = self.first_step()
        if first >= steps:  # all steps were trained: begin again
            for path in self.folder.glob("weights-*"):
                path.unlink()
            first = 0
        victim = self.random.choice(self.ranks)
        self.begin(first, min(steps - first, self.random.randrange(20, 400)))
        # Half of the events happen during the creation of communicators, which takes milliseconds.
        delay = self.random.uniform(0, 0.012) if self.random.random() < 0.5 else self.random.uniform(0, 0.4)
        time.sleep(delay)
        getattr(self, "_" + what.replace(" ", "_"))(victim)
        self.done[what] += 1

    def _none(self, victim: Rank) -> None:
        self.listen(self.ranks, time.monotonic() + DEADLINE_S + SLACK_S, _is_end)

    def _kill(self, victim: Rank) -> None:
        victim.process.kill()
        others = [rank for rank in self.ranks if rank is not victim]
        self.listen(others, time.monotonic() + DEADLINE_S + SLACK_S, _is_end)
        victim.end()
        self.ranks[victim.rank] = Rank(self.program, self.folder, victim.rank, self.world)

    def _short_stop(self, victim: Rank) -> None:
        victim.process.send_signal(signal.SIGSTOP)
        time.sleep(self.random.uniform(0.01, SHORT_S))
        victim.process.send_signal(signal.SIGCONT)
        self.listen(self.ranks, time.monotonic() + DEADLINE_S + SLACK_S, _is_end)
        for rank in self.ranks:
            if rank.status != "OK":
                raise Broken(f"turn {self.turn}: one rank was stopped for a moment: {rank.status} {rank.message}")

    def _long_stop(self, victim: Rank) -> None:
        victim.process.send_signal(signal.SIGSTOP)
        others = [rank for rank in self.ranks if rank is not victim]
        # The others must end before the victim continues.
        self.listen(others, time.monotonic() + 3 * DEADLINE_S + SLACK_S, _is_end)
        victim.process.send_signal(signal.SIGCONT)
        self.listen([victim], time.monotonic() + 3 * DEADLINE_S + SLACK_S, _is_end)

    def check_growth(self, held: list[tuple[int, int, int]], rank: int) -> None:
        """Checks a process's resources after its turns, without the first three, which allocate once."""
        rest = held[3:]
        if len(rest) < 4:
            return
        for name, numbers in (("descriptors", [h[0] for h in rest]), ("threads", [h[1] for h in rest])):
            if max(numbers) > min(numbers):
                raise Broken(f"{name} of rank {rank} grow over its turns: {numbers}")
        memory = [h[2] for h in rest]
        third = max(2, len(memory) // 3)
        grown = statistics.median(memory[-third:]) - statistics.median(memory[:third])
        if grown > GROWTH_KB:
            raise Broken(f"memory of rank {rank} grows over its {len(held)} turns: {memory} KiB")
        self.done["turns watched for growth"] += len(held)

    def close(self) -> None:
        for rank in self.ranks:
            rank.end()


def _is_end(line: str) -> bool:
    return line.startswith("end ")


def numbers_for(minutes: float) -> Iterator[int]:
    """Yields 1, 2, ... until `minutes` have passed, and prints the progress to stderr every minute."""
    began = told = time.monotonic()
    number = 0
    while (now := time.monotonic()) < began + 60 * minutes:
        if now >= told + 60:
            told = now
            print(f"soak: {(now - began) / 60:.0f} of {minutes:g} minutes, {number} ended", file=sys.stderr, flush=True)
        number += 1
        yield number


def main(description: str | None, run: Callable[..., Any], ranks: int | None = None) -> None:
    """Prints the result of `run(minutes, [ranks,] seed)`. ranks: the default of --ranks; None: there is no option."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5)
    if ranks is not None:
        parser.add_argument("--ranks", type=int, default=ranks)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"), help="what happens when")
    options = parser.parse_args()
    print(f"soak: seed {options.seed}", flush=True)
    try:
        print(run(options.minutes, *([] if ranks is None else [options.ranks]), options.seed))
    except Broken as broken:
        sys.exit(f"soak: BROKEN: {broken}")


def build(folder: Path) -> Path:
    """Builds the rank's program with a library from Bazel or SLUICE_EXAMPLES_LIB, and returns its path."""
    given = os.environ.get("SLUICE_EXAMPLES_LIB")
    if given is None:
        subprocess.run(["bazel", "build", "--noshow_progress", "//capi:libsluice.so.0"], cwd=ROOT, check=True)
        info = subprocess.run(["bazel", "info", "bazel-bin"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        shutil.copy(Path(info.stdout.strip()) / "capi" / "libsluice.so.0", folder)
        given = str(folder)
    flags = [
        *"-std=gnu11 -O2 -g -Wall -Wextra -Werror -D_GNU_SOURCE -I capi/include -I .".split(),
        f"-Wl,-rpath,{given}",
    ]
    sources = ["capi/test/migration/mesh.c", "contrib/soak/rank.c", f"{given}/libsluice.so.0"]
    subprocess.run(["gcc", *flags, *sources, "-lm", "-o", str(folder / "rank")], cwd=ROOT, check=True)
    return folder / "rank"


def run(minutes: float, world: int, seed: int, steps: int = 300) -> str:
    """Runs the soak, and returns its summary in one line. Raises Broken."""
    with tempfile.TemporaryDirectory(prefix="sluice_soak_") as name:
        folder = Path(name)
        program = build(folder)
        soak = Soak(program, folder, world, seed)
        ended: list[tuple[int, list[tuple[int, int, int]]]] = []
        try:
            soak.undisturbed(steps)
            for _ in numbers_for(minutes):
                before = list(soak.ranks)
                soak.disturbed(steps)
                ended += [(old.rank, old.held) for old, new in zip(before, soak.ranks, strict=True) if old is not new]
            for rank, held in ended + [(rank.rank, rank.held) for rank in soak.ranks]:
                soak.check_growth(held, rank)
        finally:
            soak.close()
    events = ", ".join(f"{soak.done[what]} x {what}" for what in EVENTS)
    statuses = ", ".join(f"{count} {status}" for status, count in soak.statuses.most_common())
    return (
        f"soak: {world} ranks, {soak.turn} turns ({events}), {soak.done['steps']} steps with the losses of an "
        f"undisturbed run, {soak.done['turns watched for growth']} turns watched for growth; ends: {statuses}; "
        f"longest call {soak.longest_s:.1f} s"
    )


if __name__ == "__main__":
    main(__doc__, run, ranks=3)
