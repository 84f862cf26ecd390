# SPDX-License-Identifier: Apache-2.0
"""Kills and stops ranks of an MPI job at random instants, restarts the job, and checks that training continues.

    .venv/bin/python contrib/soak/soak_mpi.py [--minutes 5] [--ranks 3] [--seed N]

MPI ends a job if one of its ranks dies. So each run resumes from the last weights that all ranks have; then one rank is
killed, or stopped for a moment, or stopped beyond the deadline, or nothing happens. The soak fails if the job does not
end by the deadline, if one of its processes is left, if the ranks do not wait for a rank that was stopped for a moment,
if ranks that wait for a stopped rank return a status other than TIMED_OUT or PEER_LOST, or if a loss differs in any bit
from an undisturbed run. The last line counts runs, events and statuses.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

import command
from command import Broken
from soak import DEADLINE_S, SHORT_S, SLACK_S, build

EVENTS = {"kill": 55, "short stop": 25, "long stop": 10, "none": 10}
START_S = 60.0  # for mpirun and MPI_Init, on a busy machine
STEPS = 300
LOST = ("TIMED_OUT", "PEER_LOST")
OPTIONS = ("--oversubscribe", "--allow-run-as-root", "--bind-to", "none")


class Job:
    """Runs mpirun once."""

    def __init__(self, program: Path, plugin: Path, folder: Path, world: int, first_step: int, steps: int) -> None:
        self.folder, self.world = folder, world
        for path in [*folder.glob("pid-*"), *folder.glob("said-*")]:
            path.unlink()
        self.log = (folder / "mpirun.log").open("w")
        # mpirun's sockets need a short path; its files of shared memory are named after its process.
        environment = {
            **os.environ,
            "TMPDIR": str(folder),
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "OMPI_MCA_btl_vader_backing_directory": str(folder),
        }
        arguments = [str(folder), str(first_step), str(steps), str(int(DEADLINE_S * 1000)), str(plugin)]
        self.process = subprocess.Popen(
            ["mpirun", "-n", str(world), *OPTIONS, str(program), *arguments],
            stdout=self.log,
            stderr=self.log,
            env=environment,
            start_new_session=True,
        )
        self.pids = self._wait_for_pids()

    def _wait_for_pids(self) -> list[int]:
        until = time.monotonic() + START_S
        while time.monotonic() < until and self.process.poll() is None:
            if len(list(self.folder.glob("pid-*"))) == self.world:
                return [int((self.folder / f"pid-{rank}").read_text()) for rank in range(self.world)]
            time.sleep(0.002)
        raise Broken(f"the job has not begun: {self.said()}")

    def signal(self, rank: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[rank], number)

    def wait(self, seconds: float) -> float:
        """Waits until the job and all of its processes have ended; returns the seconds that the job took."""
        began = time.monotonic()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Broken(f"the job has not ended {seconds:.0f} s later: {self.said()}") from None
        took = time.monotonic() - began
        until = time.monotonic() + SLACK_S
        while left := [pid for pid in self.pids if _is_there(pid)]:
            if time.monotonic() > until:
                raise Broken(f"processes {left} are left behind: {self.said()}")
            time.sleep(0.01)
        return took

    def lines(self, rank: int) -> list[str]:
        path = self.folder / f"said-{rank}"
        return path.read_text().splitlines() if path.exists() else []

    def said(self) -> str:
        ranks = "; ".join(f"rank {rank}: {self.lines(rank)[-1:]}" for rank in range(self.world))
        return f"{ranks}; mpirun: {(self.folder / 'mpirun.log').read_text()[-600:]}"

    def end(self) -> None:
        """Kills the processes that are left."""
        for pid in getattr(self, "pids", []):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.log.close()


def _is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Soak:
    """Runs jobs one after the other, with a random event in each."""

    def __init__(self, program: Path, plugin: Path, folder: Path, world: int, seed: int) -> None:
        self.program, self.plugin, self.folder, self.world = program, plugin, folder, world
        self.random = random.Random(seed)
        self.number = 0
        self.losses: dict[tuple[int, int], str] = {}
        self.must_know = False
        self.done: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.longest_s = 0.0
        self.run_s = 5.0

    def first_step(self) -> int:
        found: list[set[int]] = [set() for _ in range(self.world)]
        for path in self.folder.glob("weights-*-*"):
            match = re.fullmatch(r"weights-(\d+)-(\d+)", path.name)
            if match:
                found[int(match[1])].add(int(match[2]))
        last = max(set.intersection(*found), default=0)
        if last >= STEPS:
            for path in self.folder.glob("weights-*"):
                path.unlink()
            self.done["whole trainings"] += 1
            return 0
        return last

    def run(self, what: str) -> None:
        first = self.first_step()
        self.number += 1
        job = Job(self.program, self.plugin, self.folder, self.world, first, STEPS - first)
        victim = self.random.randrange(self.world)
        try:
            time.sleep(self.random.uniform(0, 0.8 * self.run_s) if what != "none" else 0)
            getattr(self, "_" + what.replace(" ", "_"))(job, victim)
            self._read(job)
        finally:
            job.end()
        self.done[what] += 1

    def _fails(self, job: Job, seconds: float) -> None:
        self.longest_s = max(self.longest_s, job.wait(seconds))

    def _none(self, job: Job, victim: int) -> None:
        began = time.monotonic()
        job.wait(300)
        self.run_s = min(self.run_s, time.monotonic() - began)
        self._all_good(job)

    def _all_good(self, job: Job) -> None:
        if job.process.returncode != 0:
            raise Broken(f"run {self.number}: nobody was disturbed for long: {job.said()}")

    def _kill(self, job: Job, victim: int) -> None:
        job.signal(victim, signal.SIGKILL)
        self._fails(job, DEADLINE_S + SLACK_S)

    def _short_stop(self, job: Job, victim: int) -> None:
        job.signal(victim, signal.SIGSTOP)
        time.sleep(self.random.uniform(0.01, SHORT_S))
        job.signal(victim, signal.SIGCONT)
        job.wait(300)
        self._all_good(job)

    def _long_stop(self, job: Job, victim: int) -> None:
        job.signal(victim, signal.SIGSTOP)
        self._fails(job, 2 * DEADLINE_S + SLACK_S)

    def _read(self, job: Job) -> None:
        for rank in range(self.world):
            for line in job.lines(rank):
                word, _, *rest = line.split(maxsplit=3)
                if word == "step" and len(rest) == 2:
                    at, loss = (rank, int(rest[0])), rest[1]
                    # A rank may be killed in the middle of a line.
                    if self.losses.get(at, None if self.must_know else loss) != loss and not _is_torn(loss):
                        raise Broken(f"run {self.number}: loss of rank {rank} in step {at[1]} is {loss}")
                    self.losses.setdefault(at, loss)
                    self.done["steps"] += 1
                if word == "end":
                    self.statuses[rest[0]] += 1
                    if rest[0] not in ("OK", *LOST):
                        raise Broken(f"run {self.number}: rank {rank}: {line}")


def _is_torn(loss: str) -> bool:
    return re.fullmatch(r"0x[01]\.[0-9a-f]+p[+-]\d+", loss) is None


def run(minutes: float, world: int, seed: int) -> str:
    """Runs the soak, and returns its summary in one line. Raises Broken."""
    with tempfile.TemporaryDirectory(prefix="sluice_soak_") as name:
        folder = Path(name)
        program = build(folder).with_name("rank_mpi")
        soak = Soak(program, _plugin(folder), folder, world, seed)
        soak.run("none")
        soak.must_know = True
        for _ in command.numbers_for(minutes):
            soak.run(soak.random.choices(list(EVENTS), list(EVENTS.values()))[0])
    events = ", ".join(f"{soak.done[what]} x {what}" for what in EVENTS)
    statuses = ", ".join(f"{count} {status}" for status, count in soak.statuses.most_common())
    return (
        f"soak: MPI, {world} ranks, {soak.number} runs ({events}), {soak.done['steps']} steps with the losses of an "
        f"undisturbed run, {soak.done['whole trainings']} trainings to their ends; ends: {statuses}; longest end of a "
        f"job {soak.longest_s:.1f} s"
    )


def _plugin(folder: Path) -> Path:
    """Returns the path of libsluice_mpi.so, built by Bazel or from the folder in SLUICE_EXAMPLES_LIB."""
    given = os.environ.get("SLUICE_EXAMPLES_LIB")
    if given is not None:
        return Path(given) / "libsluice_mpi.so"
    root = Path(__file__).resolve().parents[2]
    subprocess.run(["bazel", "build", "--noshow_progress", "//backend/comm/mpi:libsluice_mpi.so"], cwd=root, check=True)
    info = subprocess.run(["bazel", "info", "bazel-bin"], cwd=root, check=True, stdout=subprocess.PIPE, text=True)
    return Path(shutil.copy(Path(info.stdout.strip()) / "backend" / "comm" / "mpi" / "libsluice_mpi.so", folder))


if __name__ == "__main__":
    command.main(__doc__, run, ranks=3)
