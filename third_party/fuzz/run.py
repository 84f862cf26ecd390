# SPDX-License-Identifier: Apache-2.0
"""Runs the fuzz targets: clang's libFuzzer under the address and the undefined-behaviour sanitizer.

    .venv/bin/python third_party/fuzz/run.py [--seconds 60 | --hours 8 | --inputs 1000000] [--keep] [NAME ...]

Each target begins with its corpus in the tree and the inputs that earlier runs found, in .test/fuzz/NAME. An input that
breaks a target is written there as crash-*, leak-*, timeout-* or oom-*: add a test of it, then fix the bug. --keep adds
inputs to the corpus in the tree that reach new code. The last line has the number of targets that hold.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOUND = ROOT / ".test" / "fuzz"
# The folder for files that targets write; on a disk, each input would take longer.
IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
MOST_BYTES = 4096  # of a generated input; a corpus may have longer ones
BROKEN = ("crash-*", "leak-*", "timeout-*", "oom-*", "slow-unit-*")
SUFFIX = "_fuzz"


def bazel(*words: str) -> str:
    return subprocess.run(["bazel", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def targets(names: list[str]) -> dict[str, str]:
    """Returns the labels of all targets, or of the named ones, by name."""
    labels = bazel("query", "--noshow_progress", "attr(tags, fuzz, //...)").split()
    every = {label.rpartition(":")[2].removesuffix(SUFFIX): label for label in sorted(labels)}
    unknown = sorted(set(names) - set(every))
    if unknown or not every:
        raise SystemExit(f"fuzz: there is no target {', '.join(unknown)}; there are {', '.join(every)}")
    return {name: label for name, label in every.items() if not names or name in names}


def number(pattern: str, text: str) -> int:
    """Returns the last match of the pattern."""
    found = re.findall(pattern, text)
    return int(found[-1]) if found else 0


def fuzz(name: str, label: str, options: argparse.Namespace, built: Path) -> bool:
    """Runs one target, and prints inputs, edges and the input that broke it."""
    folder, _, target = label.removeprefix("//").partition(":")
    program, corpus, found = built / folder / target, ROOT / folder / "corpus" / name, FOUND / name
    found.mkdir(parents=True, exist_ok=True)
    seconds = int(options.hours * 3600) or options.seconds
    limit = f"-runs={options.inputs}" if options.inputs else f"-max_total_time={seconds}"
    command = [str(program), limit, f"-artifact_prefix={found}/", "-print_final_stats=1", "-timeout=20"]
    if not any(corpus.glob("*")) or max(file.stat().st_size for file in corpus.glob("*")) < MOST_BYTES:
        command.append(f"-max_len={MOST_BYTES}")
    log = FOUND / f"{name}.log"
    with log.open("w") as out, tempfile.TemporaryDirectory(dir=IN_MEMORY) as files:
        code = subprocess.run(
            [*command, str(found), str(corpus)],
            stdout=out,
            stderr=out,
            cwd=found,
            env={**os.environ, "TEST_TMPDIR": files},
        ).returncode
    text = log.read_text(errors="replace")
    inputs = number(r"stat::number_of_executed_units:\s*(\d+)", text)
    broken = sorted(file.name for pattern in BROKEN for file in found.glob(pattern))
    good = code == 0 and inputs > 0 and not broken
    end = "holds" if good else f"BROKEN (exit {code}: {', '.join(broken) or 'see the log'}): {log.relative_to(ROOT)}"
    edges, features = number(r"cov: (\d+)", text), number(r"ft: (\d+)", text)
    print(f"fuzz: {name}: {inputs} inputs, {edges} edges, {features} features, {end}", flush=True)
    if options.keep and good:
        keep(program, corpus, found)
    return good


def keep(program: Path, corpus: Path, found: Path) -> None:
    """Keeps inputs that add to the corpus, and no others."""
    corpus.mkdir(parents=True, exist_ok=True)
    subprocess.run([str(program), "-merge=1", str(corpus), str(found)], check=True, stderr=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--hours", type=float, default=0.0, help="for each target, instead of seconds")
    parser.add_argument("--inputs", type=int, default=0, help="for each target, instead of a time")
    parser.add_argument("--keep", action="store_true", help="add to the corpora in the tree")
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    if shutil.which("clang-14") is None:
        raise SystemExit("fuzz: clang-14 is not there: apt-get install clang-14 libclang-rt-14-dev")
    chosen = targets(options.names)
    bazel("build", "--config=fuzz", "--noshow_progress", *chosen.values())
    built = Path(bazel("info", "--config=fuzz", "--noshow_progress", "bazel-bin").strip())
    held = [fuzz(name, label, options, built) for name, label in chosen.items()]
    print(f"fuzz: {sum(held)} targets hold, {len(held) - sum(held)} do not")
    sys.exit(0 if all(held) else 1)


if __name__ == "__main__":
    main()
