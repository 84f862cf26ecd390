# SPDX-License-Identifier: Apache-2.0
"""Lists the items of a GPU run and of the prepared run, runs them, and judges their output."""

import collections
import fnmatch
import heapq
import re
import sys
import time

import programs
from programs import HERE, LAYER, SUITE

NO_GPU = 77
NOTE, MOST_NOTES = "     ", 20  # the prefix of a program's line that is not a case
SHOWN_REPORTS = 20
KERNEL_PREFIX = "sluice_"
# Parts of gpu_suite. Each way of cuBLAS has its own process: an error in a capture would break the others.
GEMMS = ("gemm_single", "gemm_lt", "gemm_grouped", "gemm_by_rule")
PARTS = ("kernels", "routing", *GEMMS, "choice", "rates", "streams", "memory", "nccl", "adam")
LAYER_PARTS = ("layer", "ranks", "calibrate")  # of gpu_layer; soak and small are separate items
# Items whose whole output is recorded as their result: rows for the table, machines, times and verdicts.
TELLING = {"choice": 20000, "rates": 12000, "calibrate": 40000, "benchmark": 20000, "profile": 60000}
SHOWN = ("choice", "rates", "benchmark")  # also printed
SECONDS = {"calibrate": {False: 20, True: 0.05}}  # arguments of parts, by --fake
SOAK_SECONDS = {False: 240, True: 4}  # by --fake
SOAK_SHARE = 0.75  # of its limit: it ends after its last case
# Tools of compute-sanitizer, with options. GEMMs are left out: they are cuBLAS's own, and slow under these tools.
# memcheck does not report API errors, as some are expected and the programs check each. racecheck looks at Sluice's
# kernels only. All reports of initcheck are needed: see own_reports().
TOOLS = {
    "memcheck": ["--report-api-errors", "no"],
    "racecheck": ["--kernel-name", f"kns={KERNEL_PREFIX}"],
    "initcheck": ["--print-limit", "100000", "--show-backtrace", "no"],
}
FOUND = 3  # the exit code of a tool with findings
# The profiler; clocks stay unchanged. If counters are unavailable, it prints one of NO_COUNTERS.
NCU = ["--clock-control", "none", "--set", "full"]
NO_COUNTERS = ("ERR_NVGPUCTRPERM", "LibraryNotLoaded", "Failed to initialize the profiler")
# Item: (script, arguments). A script reports missing requirements itself, and is then skipped.
SCRIPTS = {
    "gradients against PyTorch": ("torch_gpu.py", ["gradients"]),
    "CUDA graphs of torch": ("torch_gpu.py", ["graphs"]),
    "transformers' Mixtral on Sluice": ("torch_gpu.py", ["transformers"]),
    "DeepSpeed's MoE on Sluice": ("torch_gpu.py", ["deepspeed"]),
    "two ranks over NCCL": ("torch_gpu.py", ["ranks"]),
    **{f"benchmark {shape}": ("benchmark.py", [shape]) for shape in ("gpt3-xl", "mixtral", "qwen3", "deepseek")},
}
# Name, program or script, its arguments, the tool around it, environment variables, and its limit in seconds in the
# prepared run.
Item = collections.namedtuple("Item", "name program arguments tool variables seconds", defaults=(None, (), 0))

# --- the prepared run: a first run within ten minutes, most important items first ----------------------------------
# Name and seconds. Items that check results run in parallel, on a GPU that has room for all of them.
TOGETHER = {
    "kernels": 60,
    "gemm_single": 40,
    "layer": 60,
    "routing": 40,
    "gemm_grouped": 40,
    "gradients against PyTorch": 60,
    "ranks": 60,
    "gemm_lt": 40,
    "gemm_by_rule": 40,
    "CUDA graphs of torch": 40,
    "nccl": 30,
    "adam": 20,
    "streams": 15,
    "memory": 15,
}
JOBS = 4
# Timed or profiled items run alone on the GPU. Benchmarks listed only here have script, arguments and variables. Lists
# of GEMMs run one by one if that is expected to be the fastest way of cuBLAS.
ALONE = {
    "rates": 25,
    "choice": 55,
    "benchmark qwen3": 45,
    "benchmark qwen3, single": 45,
    "benchmark mixtral, single": 55,
    "benchmark deepseek, single": 60,
    "profile of kernels": 15,
    "profile of a grouped GEMM": 15,
    "profile of a single GEMM": 15,
    "kernels under memcheck": 40,
}
SINGLE = (("SLUICE_CUBLAS", "single"),)
PREPARED_SECONDS, START_SECONDS = 540, 15  # the start: driver, programs, wheels, versions


def only_prepared(suite):
    groups = ["--groups", "whole,ep_rank"]
    found = [
        Item(f"benchmark {shape}, single", "benchmark.py", [shape, *groups], None, SINGLE)
        for shape in ("qwen3", "mixtral", "deepseek")
    ]
    parts = {"kernels": "profile_kernels", "a grouped GEMM": "profile_grouped", "a single GEMM": "profile_single"}
    return found + [Item(f"profile of {what}", suite, [part], "ncu") for what, part in parts.items()]


def prepared(fake=False):
    """Returns [(jobs, items)] of the lists, which run one after the other."""
    known = {item.name: item for item in (*items(fake), *only_prepared(SUITE + ("_fake" if fake else "")))}
    return [
        (jobs, [known[name]._replace(seconds=seconds) for name, seconds in names.items()])
        for jobs, names in ((JOBS, TOGETHER), (1, ALONE))
    ]


def plan(phases, seconds):
    """Returns {name: (begin, end)} in seconds if every item uses its whole limit, so no item begins later. If `seconds`
    allows more, all limits are raised. Items that would end after `seconds` are left out."""

    def places(scale):
        found, now = {}, START_SECONDS
        for jobs, group in phases:
            free = [now] * jobs
            for item in group:
                begin = heapq.heappop(free)
                found[item.name] = (begin, begin + item.seconds * scale)
                heapq.heappush(free, begin + item.seconds * scale)
            now = max(free)
        return found, now

    found, end = places(1)
    if end > START_SECONDS and end < seconds:
        found, _ = places((seconds - START_SECONDS) / (end - START_SECONDS))
    return {name: place for name, place in found.items() if place[1] <= seconds + 1e-6}


def tells(item):
    """Returns the limit of characters of an item's recorded output; 0: only its last lines."""
    return TELLING.get(item.name, TELLING.get(item.name.split()[0], 0))


def is_shown(item):
    return item.name in SHOWN or item.name.split()[0] in SHOWN


def result_file(item, folder):
    return folder / (re.sub(r"\W+", "_", item.name) + ".json")


def items(fake=False):
    """Returns all items, which are the same on all machines."""
    end = "_fake" if fake else ""
    suite, layer = SUITE + end, LAYER + end
    found = [Item(part, suite, [part]) for part in PARTS]
    found += [
        Item(part, layer, [part, *([str(SECONDS[part][fake])] if part in SECONDS else [])]) for part in LAYER_PARTS
    ]
    found += [Item(name, script, arguments) for name, (script, arguments) in SCRIPTS.items()]
    for tool in TOOLS:
        found += [Item(f"{part} under {tool}", suite, [part], tool) for part in ("kernels", "routing")]
        found += [Item(f"layer and ranks under {tool}", layer, ["small"], tool)]
    return [*found, Item("soak", layer, ["soak"])]


def named(found, names):
    """Returns the items that match a comma-separated list of patterns."""
    patterns = [name.strip() for name in names.split(",")]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(item.name, pattern) for item in found):
            sys.exit(f"gpu: --items names {pattern!r}, and there is no such item: see --list")
    return [item for item in found if any(fnmatch.fnmatchcase(item.name, pattern) for pattern in patterns)]


def own_reports(text):
    """Returns initcheck's reports about Sluice's kernels. It also reports copies of unwritten padding, which are
    harmless, and reads of memory that a vendor's kernel wrote, which it does not see."""
    lines = text.split("\n")
    starts_at = [i for i, line in enumerate(lines) if "Uninitialized __global__ memory read" in line]
    return ["\n".join(lines[i : i + 4]) for i in starts_at if KERNEL_PREFIX in "".join(lines[i + 1 : i + 2])]


def judge_initcheck(text):
    """Returns (outcome, text) of a run that passed except for reports."""
    own, last = own_reports(text), text.strip().split("\n")[-1]
    if own:
        return "failed", "\n".join([*own[:SHOWN_REPORTS], f"{len(own)} such reads by kernels of Sluice's", last])
    return "passed", f"{text.count('Uninitialized')} reports, none of a kernel of Sluice's; {last}"


def what_it_told(text):
    """Returns a passed item's output without cases (versions of libraries, skipped parts), and its last line."""
    lines = text.strip().split("\n")
    notes = dict.fromkeys(line.strip() for line in lines[:-1] if line.startswith(NOTE))
    return "\n".join([*list(notes)[:MOST_NOTES], lines[-1]])


def run_item(folder, item, fake, environment, limit, most):
    """Runs an item and returns (outcome, seconds, text). Outcomes: passed, failed, skipped, no GPU, or unfinished if it
    had less than `most` seconds."""
    is_script = item.program.endswith(".py")
    command = [sys.executable, str(HERE / item.program)] if is_script else [str(folder / item.program)]
    command += item.arguments + (["--fake"] if is_script and fake else [])
    if item.name.startswith("benchmark"):
        command += ["--to", str(result_file(item, folder))]
    if item.name == "soak":
        command.append(f"{min(SOAK_SECONDS[fake], limit * SOAK_SHARE):.0f}")
    if item.tool == "ncu" and not fake:
        found = programs.find_tool("ncu")
        if found is None:
            return "skipped", 0.0, "ncu is not installed"
        command = [found, *NCU, *command]
    elif item.tool is not None and item.tool != "ncu":
        if fake:
            return "skipped", 0.0, "compute-sanitizer looks at a GPU"
        found = programs.find_tool("compute-sanitizer")
        if found is None:
            return "skipped", 0.0, "compute-sanitizer is not installed"
        command = [found, "--tool", item.tool, *TOOLS[item.tool], "--error-exitcode", str(FOUND), *command]
    began = time.monotonic()
    code, text = programs.run_within(command, environment, limit)
    if code is None:
        outcome = "failed" if limit >= most else "unfinished"
        return outcome, time.monotonic() - began, f"{text}\nended after {limit:.0f} s"
    # A script that lacks a package exits with 77; a program that lacks a GPU ends the run.
    outcome = {0: "passed", NO_GPU: "skipped" if is_script else "no GPU"}.get(code, "failed")
    refusal = next((word for word in NO_COUNTERS if item.tool == "ncu" and word in text), None)
    if refusal is not None:
        return "skipped", time.monotonic() - began, f"ncu reads no counters here: {refusal}"
    if item.tool is not None and "Device not supported" in text:
        return "skipped", time.monotonic() - began, "compute-sanitizer does not support this device here"
    if item.tool == "initcheck" and code == FOUND:
        outcome, text = judge_initcheck(text)
    if outcome == "passed" and not tells(item):
        text = what_it_told(text)
    return outcome, time.monotonic() - began, text
