# SPDX-License-Identifier: Apache-2.0
"""Tests that the shaped link has its configured speed, and that nothing of it remains afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from integration_tests.benchmarks.measuring.stolen import stolen_s
from integration_tests.net.link import Link, Outcome, run_ranks
from integration_tests.net.namespaces import NamespaceError, Namespaces, parse_rate

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.alone  # the tests measure rates and deadlines


def _namespaces_allowed(user: bool) -> str:
    try:
        with Namespaces(2, 1e9, user):
            return ""
    except NamespaceError as why:
        return str(why)


def _shaped(user: bool) -> None:
    why = _namespaces_allowed(user)
    if why:
        pytest.skip(f"no namespaces here: {why}")


def _said(word: str, *arguments: str, rate: str, user: bool | None = None) -> tuple[Outcome, list[list[float]]]:
    """Runs throughput.py, and returns the numbers of each line that begins with this word."""
    found: list[list[float]] = []

    def sink(_rank: int, line: str) -> None:
        if line.startswith(f"{word} "):
            found.append([float(number) for number in line.split()[1:]])

    argv = [sys.executable, str(HERE / "throughput.py"), *arguments]
    return run_ranks(argv, world_size=2, rate=rate, deadline_s=200, sink=sink, user=user), found


def _measure(rate: str, total: int, user: bool | None = None) -> tuple[Outcome, list[float]]:
    """Measures the megabits per second that each of two ranks received while both were sending."""
    outcome, spans = _said("span", str(total), rate=rate, user=user)
    first = min((begin for begin, _ in spans), default=0.0)
    return outcome, [total * 8 / 1e6 / (end - first) for _, end in spans]


def _eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def _stolen_s() -> float:
    return stolen_s(Path("/proc/stat").read_text(), os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("rate", "mbit", "total", "user"),
    [("200mbit", 200, 12_000_000, True), ("1gbit", 1000, 60_000_000, os.geteuid() != 0)],
)
def test_link_both_directions_at_once_carry_the_rate(rate: str, mbit: int, total: int, user: bool) -> None:
    """The upper bound is sharp (the shaper works in both directions), the lower one loose (the machine may be busy)."""
    _shaped(user)
    slowest, begin, lost = 0.0, time.monotonic(), _stolen_s()
    for _attempt in range(4):  # a busy machine can keep a rank from its core for longer than the whole measurement
        outcome, seen = _measure(rate, total, user)
        assert outcome.status == 0 and ("user namespaces" in outcome.link) == user, outcome
        assert len(seen) == 2
        assert max(seen) < 1.1 * mbit, (rate, seen)  # the burst of the shaper is a few per cent of the bytes
        slowest = max(slowest, min(seen))
        if slowest > 0.5 * mbit:
            return
    _, unshaped = _measure("none", total)  # the speed of this machine without a shaper, at its present load
    share = (_stolen_s() - lost) / (time.monotonic() - begin)
    if share > 0.1:
        pytest.skip(f"{rate}: the host took {share:.0%} of a core for others: {slowest:.0f} Mbit/s say nothing")
    assert slowest > 0.5 * min(unshaped), f"{rate}: at best {slowest:.0f} Mbit/s, without a shaper {unshaped}"


def test_link_short_message_after_a_pause_takes_its_time() -> None:
    """An idle link accepts less than a millisecond of data at once, so short exchanges have the rate of long ones."""
    _shaped(os.geteuid() != 0)
    total = 100_000
    outcome, took = _said("took", str(total), "pauses", rate="200mbit")
    assert outcome.status == 0, outcome
    assert len(took) > 1
    assert min(took)[0] > 0.9 * (8 * total / 200e6 - 1e-3), took


def test_link_tools_missing_runs_over_loopback_and_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may lack iproute2."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with Link(2, "1gbit") as link:
        assert link.description == "loopback"
        assert link.fallback.endswith(
            "the commands ip, tc, unshare, nsenter are not installed (iproute2, util-linux)."
        ), link.fallback
        assert link.environment(0)["MASTER_ADDR"] == "127.0.0.1"


def test_link_rate_not_understood_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    """A typing error must become neither another rate nor loopback."""
    argv = [sys.executable, str(HERE / "link.py"), "--rate", "1gb", "--", "touch", str(tmp_path / "ran")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "rate '1gb' is not understood" in done.stderr
    assert not (tmp_path / "ran").exists()
    assert parse_rate("0.4gbit") == 4e8
    for bad in ("", "fast", "-1gbit", "0mbit", "1gbit 200mbit", "None"):
        with pytest.raises(ValueError, match="not understood"):
            parse_rate(bad)


def test_link_one_rank_fails_all_end_with_its_last_lines() -> None:
    """The other rank, which sleeps forever, must be stopped."""
    script = "import os,time,sys\nif os.environ['RANK']=='1': print('alas'); sys.exit(7)\ntime.sleep(3600)"
    lines: list[str] = []
    begin = time.monotonic()
    outcome = run_ranks(
        [sys.executable, "-c", script], rate="none", grace_s=0.5, sink=lambda _rank, line: lines.append(line)
    )
    assert (outcome.status, outcome.reason, outcome.link) == (7, "rank 1 returned 7", "loopback")
    assert outcome.tails[1] == ["alas"] == lines
    assert time.monotonic() - begin < 200


def test_link_deadline_passes_everything_stops() -> None:
    """The status is 124, as with timeout(1)."""
    argv = [sys.executable, "-c", "import time; time.sleep(3600)"]
    assert run_ranks(argv, rate="none", deadline_s=0.5).status == 124


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_link_launcher_is_killed_nothing_stays(number: signal.Signals) -> None:
    """Ranks, holders and namespaces end, even if the launcher cannot clean up."""
    why = _namespaces_allowed(os.geteuid() != 0)
    rate = "none" if why else "1gbit"
    script = "import os,time; print('pid', os.getpid(), os.readlink('/proc/self/ns/net'), flush=True); time.sleep(3600)"
    argv = [sys.executable, str(HERE / "link.py"), "--rate", rate, "--", sys.executable, "-c", script]
    links_before = Path("/proc/net/dev").read_text().count(":")
    launcher = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    pids, spaces = [], set()
    while len(pids) < 2:
        words = launcher.stdout.readline().split()
        assert words, "the launcher ended early"
        if "pid" in words:
            pids.append(int(words[2]))
            spaces.add(words[3])
    family = [*pids, *_children(launcher.pid)]
    if not why:
        assert len(spaces) == 2
        assert os.readlink("/proc/self/ns/net") not in spaces
    launcher.send_signal(number)
    launcher.stdout.close()
    launcher.wait(timeout=100)
    assert launcher.returncode != 0
    assert _eventually(lambda: not any(_alive(pid) for pid in family)), family
    assert _eventually(lambda: Path("/proc/net/dev").read_text().count(":") == links_before)


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
