# SPDX-License-Identifier: Apache-2.0
"""Tests the GPU harness without a GPU: its lists, its build, its errors, and all of its programs on fakes."""

import importlib.machinery
import importlib.util
import itertools
import json
import pathlib
import re
import subprocess
import sys
import threading

import pytest

HERE = pathlib.Path(__file__).resolve().parent
RUN = HERE / "run"
ROOT = HERE.parent.parent
NO_GPU = 77


@pytest.fixture(scope="module")
def harness():
    """Loads the script as a module; its `items` and `programs` are separate modules."""
    loader = importlib.machinery.SourceFileLoader("gpu_run", str(RUN))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_run", loader))
    loader.exec_module(module)
    return module


def run(*arguments, timeout=250):
    return subprocess.run([sys.executable, str(RUN), *arguments], capture_output=True, text=True, timeout=timeout)


def test_NoGpu_IsSaidInPlainWordsBeforeAnythingIsBuilt(harness, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness.programs, "why_no_gpu", lambda: "no NVIDIA driver (not here)")
    monkeypatch.setattr(harness.programs, "build", lambda *_: pytest.fail("it builds"))
    monkeypatch.setattr(sys, "argv", ["run", "--record", str(tmp_path / "record.json")])
    assert harness.main() == NO_GPU
    first, last = capsys.readouterr().out.strip().split("\n")
    assert first.startswith("gpu: no GPU here, nothing was run: this machine has no NVIDIA driver (not here).")
    assert last == "0 passed, 0 failed"
    assert not (tmp_path / "record.json").exists()


def test_Programs_HaveThePartsThatTheHarnessRuns(harness):
    text = (ROOT / "backend/cts/gpu/gpu_suite_main.c").read_text()
    found = [*harness.items.items(), *(item for _, group in harness.items.prepared() for item in group)]
    parts = {item.arguments[0] for item in found if item.program == "gpu_suite"}
    assert len(parts) > 10
    assert all(f'"{part}", gpu_part_{part}' in text for part in parts)
    text = (ROOT / "capi/test/cuda/gpu_layer_main.c").read_text()
    assert all(f'"{part}", part_{part}' in text for part in (*harness.items.LAYER_PARTS, "soak", "small"))


def prepared_names(harness):
    return [item.name for _, group in harness.items.prepared() for item in group]


def test_Prepared_EveryItemHasItsPlace_EvenIfAllTakeAllTheyMay(harness):
    """All items fit into one command; timed items overlap nothing, and at most JOBS of the others run at once."""
    phases = harness.items.prepared()
    seconds = harness.items.PREPARED_SECONDS
    places = harness.items.plan(phases, seconds)
    assert seconds <= 540
    assert set(places) == set(prepared_names(harness))
    assert max(end for _, end in places.values()) <= seconds + 1e-6
    for begin, _ in places.values():
        others = [name for name, (b, e) in places.items() if b <= begin + 1e-6 < e - 1e-6]
        assert len(others) <= (1 if set(others) & set(harness.items.ALONE) else harness.items.JOBS), others
    begins = [places[name][0] for name in prepared_names(harness)]
    assert begins == sorted(begins)
    for _, group in phases:
        assert all(places[item.name][1] - places[item.name][0] >= item.seconds > 0 for item in group)


def test_Prepared_Run_KeepsOrderLimitsAndEnvironments(harness, tmp_path, monkeypatch, capsys):
    """No item really runs: first JOBS begin at once, then one at a time, each with at least the seconds of the plan.
    The results are a few files in one folder, and the record has the environment.
    """
    phases, began, running, most = harness.items.prepared(), [], [0], []
    meet, lock = threading.Barrier(harness.items.JOBS), threading.Lock()
    names = prepared_names(harness)
    monkeypatch.setattr(harness.items, "prepared", lambda fake: phases)
    monkeypatch.setattr(harness.programs, "OUT", tmp_path)
    monkeypatch.setattr(harness.programs, "build", lambda folder, fake: None)
    monkeypatch.setattr(harness.programs, "why_no_gpu", lambda: None)
    monkeypatch.setattr(harness, "versions", dict)
    monkeypatch.setenv("SLUICE_SET_BY_HAND", "1")

    def run_item(folder, item, fake, environment, limit, most_seconds):
        with lock:
            began.append(item.name)
            running[0] += 1
            most.append(running[0])
        assert limit >= item.seconds >= most_seconds, item.name
        if item.name in names[: harness.items.JOBS]:
            meet.wait(200)
        with lock:
            running[0] -= 1
        return ("failed" if item.name == "gemm_grouped" else "passed"), 0.5, "1 passed, 0 failed"

    monkeypatch.setattr(harness.items, "run_item", run_item)
    results = tmp_path / "results"
    arguments = ["run", "--prepared", "--copy-to", str(results)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert harness.main() == 1
    assert began[len(harness.items.TOGETHER) :] == list(harness.items.ALONE)
    assert sorted(began) == sorted(names)
    assert max(most) == harness.items.JOBS
    assert set(most[-len(harness.items.ALONE) :]) == {1}
    assert sorted(path.name for path in results.iterdir()) == ["log", "record.json"]
    record = json.loads((results / "record.json").read_text())["items"]
    single, plain = (record[name]["environment"] for name in ("benchmark mixtral, single", "benchmark qwen3"))
    assert single == {**plain, "SLUICE_CUBLAS": "single"}
    assert plain["SLUICE_SET_BY_HAND"] == "1"
    assert "SLUICE_CUBLAS" not in plain
    assert "gpu: passed in 0.5 s of " in (results / "log").read_text()
    assert capsys.readouterr().out.endswith(f"{len(names) - 1} passed, 1 failed\n")
    began.clear()  # the next call repeats what failed, and has all the time for it
    monkeypatch.setattr(sys, "argv", [*arguments, "--seconds", "100"])
    assert harness.main() == 1
    assert began == ["gemm_grouped"]


@pytest.mark.parametrize(("most", "outcome"), [(1.5, "failed"), (400, "unfinished")])
def test_ItemSeconds_ThatAreOver_MakeAFailure(harness, tmp_path, most, outcome):
    """An item that the end of the command's time cut short is not judged. What it started ends too."""
    (tmp_path / "program").write_text("#!/bin/sh\necho begun\nsleep 3000 &\nwait\n")
    (tmp_path / "program").chmod(0o755)
    got, _, text = harness.items.run_item(tmp_path, harness.items.Item("a", "program", []), False, None, 1.5, most)
    assert (got, text.split("\n")[0]) == (outcome, "begun")


OF_A_COPY = """========= Host API memory access error at host access to 0x7f8e00000200 of size 400 bytes
=========     Uninitialized access at 0x7f8e00000300 on access by cuMemcpyDtoHAsync source
"""
OF_A_VENDOR = """========= Uninitialized __global__ memory read of size 16 bytes
=========     at gemm_sm90_tensor+0x1250
=========     by thread (0,0,0) in block (0,0,0)
"""
OF_OURS = """========= Uninitialized __global__ memory read of size 4 bytes
=========     at sluice_gather_rows+0x1b0
=========     by thread (3,0,0) in block (1,0,0)
=========     Address 0x7f8e0000020c
"""


@pytest.mark.parametrize(
    ("tool", "reports", "outcome"),
    [
        ("initcheck", OF_A_COPY + OF_A_VENDOR, "passed"),
        ("initcheck", OF_A_COPY + OF_OURS + OF_A_VENDOR, "failed"),
        ("memcheck", OF_A_COPY, "failed"),
    ],
)
def test_Tool_ThatReports_IsJudgedByOurKernelsWhereItKnowsNoBetter(
    harness, tmp_path, monkeypatch, tool, reports, outcome
):
    """Only initcheck also reports copies of padding, and reads of memory that a vendor's kernel wrote."""
    (tmp_path / "reports").write_text(reports)
    (tmp_path / "compute-sanitizer").write_text(f'#!/bin/sh\necho "$@"\ncat {tmp_path}/reports\necho the end\nexit 3\n')
    (tmp_path / "compute-sanitizer").chmod(0o755)
    monkeypatch.setattr(harness.programs, "find_tool", lambda name: str(tmp_path / name))
    item = next(item for item in harness.items.items() if item.name == f"routing under {tool}")
    got, _, text = harness.items.run_item(tmp_path, item, False, None, 200, 470)
    assert got == outcome
    assert text.endswith("the end\n" if tool == "memcheck" else "the end")
    if tool == "memcheck":
        program = tmp_path / "gpu_suite"
        assert text.startswith(f"--tool memcheck --report-api-errors no --error-exitcode 3 {program} routing\n")
    elif outcome == "failed":
        assert text.startswith(OF_OURS)
        assert "1 such reads" in text


@pytest.mark.parametrize("has_bazel", [False, True])
def test_Build_FromAnotherMachine_IsTakenWhereItStarts(harness, tmp_path, monkeypatch, has_bazel):
    """Copies may lack mode bits. Programs that do not start, or have other sources, are built again if Bazel is
    installed; otherwise a message says where to build them.
    """
    build, commands = harness.programs.build, []
    monkeypatch.setattr(harness.programs, "source_hash", lambda: "now")
    monkeypatch.setattr(harness.programs.shutil, "which", lambda name: name if has_bazel else None)
    monkeypatch.setattr(
        harness.programs, "run_here", lambda *command: commands.append(command[0]) or "gpu: no compiler"
    )
    (tmp_path / "built").write_text("now")
    for program in ("gpu_suite", "gpu_layer"):
        (tmp_path / program).write_text("#!/bin/sh\nexit 0\n")
        (tmp_path / program).chmod(0o644)
    (tmp_path / "nothing.c").write_text("int nothing;\n")
    library = tmp_path / "libsluice.so.0"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "nothing.c"], check=True)
    assert build(tmp_path, False) is None
    library.write_text("of another machine")
    does_not_start = build(tmp_path, False)
    (tmp_path / "built").write_text("of other sources")
    is_of_others = build(tmp_path, False)
    assert commands == (["bazel"] * 2 if has_bazel else [])
    if has_bazel:
        assert does_not_start == is_of_others == "gpu: no compiler"
    else:
        assert "does not start on this machine, and there is no Bazel here" in does_not_start
        assert "is not of these sources" in is_of_others
        assert "integration_tests/gpu/run --build" in is_of_others


def test_Carried_TheTreeAndWhatIsBuilt_FitAndWhatDoesNotIsRefused(harness, tmp_path):
    """The tree alone may take half of the limit: programs, library and wheels take some 7 MiB."""
    programs = harness.programs
    assert programs.carried_bytes(tmp_path) < programs.MOST_CARRIED / 2
    assert programs.say_carried(tmp_path) is None
    with (tmp_path / "core").open("wb") as file:
        file.truncate(programs.MOST_CARRIED)
    assert "more than 64 MiB" in programs.say_carried(tmp_path)


@pytest.mark.full
@pytest.mark.timeout(2000)
def test_Fake_BuildsAndRunsEveryItemOnThisCpu(harness, tmp_path):
    """The whole harness runs without a GPU: the same programs, lists, record and last line."""
    record = tmp_path / "record.json"
    done = run("--fake", "--fresh", "--record", str(record), timeout=1500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.fullmatch(r"\d+ passed, 0 failed", done.stdout.strip().split("\n")[-1])
    outcomes = {name: item["outcome"] for name, item in json.loads(record.read_text())["items"].items()}
    assert sorted(outcomes) == sorted(item.name for item in harness.items.items(True))
    skipped = {name for name, outcome in outcomes.items() if outcome == "skipped"}
    assert skipped <= {
        item.name for item in harness.items.items(True) if item.tool is not None or item.program[-3:] == ".py"
    }
    if all(importlib.util.find_spec(name) for name in ("torch", "cffi")):  # the package is the one that was built here
        assert "gradients against PyTorch" not in skipped
        assert not [name for name in skipped if name.startswith("benchmark")]
    assert "failed" not in outcomes.values()
    again = run("--fake", "--record", str(record), timeout=450)
    assert again.stdout.count("passed before") == len(outcomes) - len(skipped)


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_Prepared_OnFakes_RunsTheWholeListInItsOrder(harness, tmp_path):
    """The programs and scripts are the same, with more seconds than on a GPU, as a CPU is slower."""
    results = tmp_path / "results"
    arguments = ["--seconds", "5400", "--copy-to", str(results), "--record", str(tmp_path / "record.json")]
    done = run("--prepared", "--fake", *arguments, timeout=2900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    record = json.loads((results / "record.json").read_text())["items"]
    assert sorted(record) == sorted(prepared_names(harness))
    for names in (harness.items.TOGETHER, harness.items.ALONE):
        began = [record[name]["began"] for name in names]
        assert began == sorted(began)
    for before, after in itertools.pairwise(harness.items.ALONE):
        assert record[before]["began"] + record[before]["seconds"] <= record[after]["began"] + 0.2
    assert [name for name, item in record.items() if item["outcome"] != "passed"] == ["kernels under memcheck"]
    assert record["benchmark deepseek, single"]["result"]["ep_rank"]
    files = list(results.rglob("*"))
    assert len(files) <= 8
    assert all(path.parent == results and path.stat().st_size < 16 << 20 for path in files)
