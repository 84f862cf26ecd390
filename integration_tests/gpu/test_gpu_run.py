"""The GPU harness, as far as it goes without a GPU: its lists, its build, its refusal. What needs one skips aloud."""

import importlib.machinery
import importlib.util
import json
import pathlib
import re
import subprocess
import sys
import time
import types
import zipfile

import pytest

HERE = pathlib.Path(__file__).resolve().parent
RUN = HERE / "run"
NO_GPU = 77


@pytest.fixture
def root():
    return HERE.parent.parent


@pytest.fixture(scope="module")
def harness():
    loader = importlib.machinery.SourceFileLoader("gpu_run", str(RUN))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gpu_run", loader))
    loader.exec_module(module)
    return module


def run(*arguments, timeout=250):
    return subprocess.run([sys.executable, str(RUN), *arguments], capture_output=True, text=True, timeout=timeout)


def test_Sources_AreThoseOfBazel(harness, root):
    assert all(len(harness.sources(letter)) > 10 for letter in harness.PROGRAMS)
    wanted = harness.sources_text()
    assert (HERE / "sources.txt").read_text() == wanted, "run integration_tests/gpu/run --update-sources"
    query = 'kind("source file", deps(//backend/cts/gpu:gpu_suite))'
    done = subprocess.run(
        ["bazel", "query", "--noshow_progress", query], cwd=root, capture_output=True, text=True, check=True
    )
    labels = {line[2:].replace(":", "/") for line in done.stdout.split("\n") if line.startswith("//")}
    device = {label for label in labels if "/cuda/kernels/" in label}
    assert device == {str(path.relative_to(root)) for path in harness.device_sources()}


@pytest.mark.parametrize("fake", [False, True])
def test_Parts_CoverEveryItemOnce(harness, fake):
    names = [item.name for item in harness.items(fake)]
    assert len(names) == len(set(names)) >= 10
    for count in (1, 2, 3, 7, 40):
        found = [item.name for i in range(count) for item in harness.chosen(f"{i + 1}/{count}", fake)]
        assert sorted(found) == sorted(names)


@pytest.mark.parametrize("part", ["0/3", "4/3", "1", "a/b", "1/0"])
def test_Part_Nonsense_IsRefused(part):
    done = run("--part", part, "--list")
    assert done.returncode == 1
    assert f"--part is {part}" in done.stderr


def test_List_NamesWhatIsAbsentAndWhy(harness):
    done = run("--list")
    assert done.returncode == 0
    for name, why in harness.ABSENT.items():
        assert f"absent: {name}: {why}" in done.stdout


@pytest.mark.parametrize("options", [[], ["--fake"]])
def test_Dry_CompilesEverySourceAndLinksEachProgram(harness, options):
    lines = run("--dry", *options).stdout.strip().split("\n")
    letters = "sl" if options else "SL"
    for source in {source for letter in letters for source in harness.sources(letter)}:
        assert sum(f" -c {source} " in line for line in lines) == 1
    assert sum("sluice_kernels.cu" in line for line in lines) == (0 if options else 1)
    for letter in letters:
        assert sum(line.endswith("/" + harness.PROGRAMS[letter][0]) for line in lines) == 1
    assert sum(line.endswith("/libsluice.so.0") for line in lines) == 1


def test_NoGpu_IsSaidInPlainWordsBeforeAnythingIsBuilt(harness, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "why_no_gpu", lambda: "no NVIDIA driver (not here)")
    monkeypatch.setattr(harness, "build", lambda *_: pytest.fail("it builds"))
    monkeypatch.setattr(sys, "argv", ["run", "--record", str(tmp_path / "record.json")])
    assert harness.main() == NO_GPU
    first, last = capsys.readouterr().out.strip().split("\n")
    assert first.startswith("gpu: no GPU here, nothing was run: this machine has no NVIDIA driver (not here).")
    assert last == "0 passed, 0 failed"
    assert not (tmp_path / "record.json").exists()


@pytest.mark.parametrize(
    ("init", "count", "why"),
    [
        (100, 0, "an NVIDIA driver that sees no GPU"),
        (0, 0, "an NVIDIA driver that sees no GPU"),
        (803, 0, "an NVIDIA driver that does not start (CUresult 803)"),
        (0, 1, None),
    ],
)
def test_Driver_IsAskedWhetherThereIsAGpu(harness, tmp_path, monkeypatch, init, count, why):
    source = tmp_path / "driver.c"
    source.write_text(
        f"int cuInit(unsigned f) {{ return {init}; }}\nint cuDeviceGetCount(int* n) {{ *n = {count}; return 0; }}\n"
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert harness.why_no_gpu() == why


@pytest.mark.parametrize("edited", [False, True])
def test_Build_ThatFails_SaysWhyFirstAndEndsAsEver(harness, tmp_path, monkeypatch, capsys, edited):
    hashes = iter(["before", "after" if edited else "before"])
    monkeypatch.setattr(harness, "source_hash", lambda fake: next(hashes))
    monkeypatch.setattr(harness, "OUT", tmp_path)
    step = (tmp_path / "thing.o", ["sh", "-c", "echo no such header >&2; exit 1"])
    monkeypatch.setattr(harness, "commands", lambda *_: [[step]])
    monkeypatch.setattr(sys, "argv", ["run", "--fake"])
    assert harness.main() == 1
    lines = capsys.readouterr().out.strip().split("\n")
    assert lines[:2] == ["gpu: thing.o does not build:", "no such header"]
    assert ("gpu: sources were edited while they were built: run again" in lines) == edited
    assert lines[-1] == "0 passed, 1 failed"


def test_Programs_HaveThePartsThatTheHarnessRuns(harness, root):
    text = (root / "backend/cts/gpu/gpu_suite_main.c").read_text()
    assert all(f'"{part}", gpu_part_{part}' in text for part in harness.PARTS)
    text = (root / "capi/test/cuda/gpu_layer_main.c").read_text()
    assert all(f'"{part}", part_{part}' in text for part in (*harness.LAYER_PARTS, "soak", "small"))


def test_Record_RepeatsOnlyWhatDidNotPass(harness, tmp_path, monkeypatch, capsys):
    """The loop over items with stand-ins for the programs: one fails first, passes then."""
    log, record = tmp_path / "log", tmp_path / "record.json"
    for program in ("gpu_suite", "gpu_layer"):
        script = tmp_path / program
        script.write_text(
            f'#!/bin/sh\necho "$1" >>{log}\n'
            f'[ "$1" = gemm ] && [ ! -e {tmp_path}/again ] && exit 1\n'
            'echo "3 passed, 0 failed"\n'
        )
        script.chmod(0o755)
    asked = []
    monkeypatch.setattr(harness, "versions", lambda: asked.append(1) or {})
    monkeypatch.setattr(harness, "TOOLS", ())
    monkeypatch.setattr(harness, "SCRIPTS", {})
    monkeypatch.setattr(sys, "argv", ["run", "--record", str(record), "--programs", str(tmp_path)])
    assert harness.main() == 1
    assert capsys.readouterr().out.endswith("11 passed, 1 failed\n")
    assert json.loads(record.read_text())["items"]["gemm"]["outcome"] == "failed"
    (tmp_path / "again").touch()
    assert harness.main() == 0
    assert capsys.readouterr().out.endswith("12 passed, 0 failed\n")
    assert len(asked) == 1
    assert log.read_text().split() == [*harness.PARTS, *harness.LAYER_PARTS, "soak", "gemm"]


def test_Benchmark_WhatItWroteAndSaid_IsInTheRecordAndOnTheScreen(harness, tmp_path, monkeypatch, capsys):
    script, record = tmp_path / "stand_in.py", tmp_path / "record.json"
    script.write_text(
        "import os, pathlib\n"
        "where = pathlib.Path(os.environ['SLUICE_GPU_BUILD'])\n"
        "(where / 'benchmark_mixtral.json').write_text('{\"verdicts\": {\"of_floor\": 0.5}}')\n"
        "print('mixtral: of_floor: 0.5')\nprint('written')\n"
    )
    (tmp_path / "benchmark_qwen3.json").write_text('{"of": "an earlier run"}')
    for name, value in (("TOOLS", ()), ("PARTS", ()), ("LAYER_PARTS", ())):
        monkeypatch.setattr(harness, name, value)
    scripts = {"benchmark mixtral": (str(script), []), "benchmark qwen3": (str(tmp_path / "is_not_there.py"), [])}
    monkeypatch.setattr(harness, "SCRIPTS", scripts)
    monkeypatch.setattr(harness, "versions", dict)
    (tmp_path / "gpu_layer").write_text('#!/bin/sh\necho "1 passed, 0 failed"\n')
    (tmp_path / "gpu_layer").chmod(0o755)
    monkeypatch.setattr(sys, "argv", ["run", "--record", str(record), "--programs", str(tmp_path)])
    assert harness.main() == 1
    out = capsys.readouterr().out
    assert "benchmark mixtral\nmixtral: of_floor: 0.5\nwritten\n" in out, out
    items = json.loads(record.read_text())["items"]
    assert items["benchmark mixtral"]["result"] == {"verdicts": {"of_floor": 0.5}}
    assert items["benchmark mixtral"]["text"].startswith("mixtral: of_floor")
    assert items["benchmark qwen3"]["outcome"] == "failed"
    assert "result" not in items["benchmark qwen3"]


def test_Verdicts_OfWhatDidNotRun_AreNotKnown(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(HERE))
    import benchmark

    def took(ms):
        return {"median_ms": ms, "saved_bytes": 10**9}

    record = {
        "fake": False,
        "whole": {"sluice": took(50.0), "transformers": took(60.0)},
        "ep_rank": {"sluice n=1": took(10.0), "sluice n=4": took(10.2)},
        "budget": {"sluice n=4 budget": took(11.0), "memory_budget": 7},
        "offload": {"hidden": 0.6, "hideable_at_this_link": 0.8},
        "refused": {"torch grouped_mm": "ImportError: no"},
    }
    sizes = benchmark.Sizes("mixtral", False)
    record["verdicts"] = benchmark.verdicts(record, sizes)
    assert record["verdicts"] == {
        "of_floor": 0.88,
        "ahead_of_transformers": True,
        "saved_bytes_at_most_sonicmoe": True,
        "offload_hidden_of_hideable": 0.75,
        "n4_over_n1": 1.02,
    }
    benchmark.say("mixtral", record)
    lines = capsys.readouterr().out.split("\n")
    assert "mixtral: of_floor: 0.88 (wanted: at least 0.85)" in lines
    assert "mixtral: torch grouped_mm did not run: ImportError: no" in lines
    assert "mixtral budget: sluice n=4 budget: 11.0 ms, saved 1000000000 bytes" in lines
    nothing = {"whole": {}, "ep_rank": {}, "offload": {}}
    assert set(benchmark.verdicts(nothing, sizes).values()) == {None}


def test_Benchmark_GroupThatFails_LeavesWhatRan(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(HERE))
    import benchmark

    record = {"whole": {}, "refused": {}}
    written = benchmark.Written(record, tmp_path / "benchmark_mixtral.json")
    written.group("sluice", record["whole"].update, {"sluice": 1})
    written.group("sluice n=4 offload", lambda: 1 // 0)
    found = json.loads((tmp_path / "benchmark_mixtral.json").read_text())
    assert found["whole"] == {"sluice": 1}
    assert found["refused"]["sluice n=4 offload"].startswith("ZeroDivisionError")


@pytest.mark.parametrize(
    ("options", "left", "all_of_them"),
    [
        (["--seconds", "3"], "2 left for the next call: choice, soak", 3),
        (["--part", "1/2"], "1 left for the next call: soak", 2),
    ],
)
def test_Seconds_WhatDoesNotFit_IsLeftForTheNextCall(
    harness, tmp_path, monkeypatch, capsys, options, left, all_of_them
):
    """Stand-ins of 2 s each, on a clock of the test's own, under a budget that holds one; the next call goes on, and
    results are copied each time. A part has a budget of its own.
    """
    record, results = tmp_path / "record.json", tmp_path / "results"
    for program in ("gpu_suite", "gpu_layer"):
        (tmp_path / program).write_text('#!/bin/sh\necho "1 passed, 0 failed"\n')
        (tmp_path / program).chmod(0o755)
    (tmp_path / "benchmark_x.json").write_text("{}")
    for name, value in (("TOOLS", ()), ("SCRIPTS", {}), ("PARTS", ("kernels", "choice")), ("LAYER_PARTS", ())):
        monkeypatch.setattr(harness, name, value)
    monkeypatch.setattr(harness, "versions", dict)
    monkeypatch.setattr(harness, "FEWEST_SECONDS", 1.5)
    monkeypatch.setattr(harness, "PART_SECONDS", 3)
    clock, run_within = [0.0], harness.run_within

    def two_seconds(command, environment, _limit):
        clock[0] += 2
        return run_within(command, environment, 200)

    monkeypatch.setattr(harness, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(harness, "run_within", two_seconds)
    arguments = ["--record", str(record), "--programs", str(tmp_path), "--copy-to", str(results)]
    monkeypatch.setattr(sys, "argv", ["run", *arguments, *options])
    assert harness.main() == 0
    out = capsys.readouterr().out
    assert out.endswith(f"gpu: {left}\n1 passed, 0 failed\n"), out
    assert sorted(path.name for path in results.iterdir()) == ["benchmark_x.json", "record.json"]
    monkeypatch.setattr(sys, "argv", ["run", *arguments, *options, "--seconds", "30"])
    assert harness.main() == 0
    assert capsys.readouterr().out.endswith(f"{all_of_them} passed, 0 failed\n")


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("kernels", ["kernels"]),
        (
            "benchmark *, soak",
            ["benchmark gpt3-xl", "benchmark mixtral", "benchmark qwen3", "benchmark deepseek", "soak"],
        ),
        ("* under racecheck", [f"{part} under racecheck" for part in ("kernels", "routing", "layer and ranks")]),
    ],
)
def test_Items_NamedByPatterns_AreThoseAlone(harness, names, found):
    assert [item.name for item in harness.named(harness.items(), names)] == found


def test_Items_WithANameThatIsNone_AreRefused():
    done = run("--items", "kernels,bench mark", "--list")
    assert done.returncode == 1
    assert "--items names 'bench mark'" in done.stderr


@pytest.mark.parametrize(("most", "outcome"), [(1.5, "failed"), (400, "unfinished")])
def test_ItemSeconds_ThatAreOver_MakeAFailure(harness, tmp_path, most, outcome):
    """One that was cut short by what was left of the command is not judged."""
    item = harness.Item("kernels", "program", [])
    (tmp_path / "program").write_text("#!/bin/sh\necho begun\nexec sleep 3000\n")
    (tmp_path / "program").chmod(0o755)
    got, _, text = harness.run_item(tmp_path, item, False, None, 1.5, most)
    assert (got, text.split("\n")[0]) == (outcome, "begun")


@pytest.mark.parametrize(("limit", "seconds"), [(470, "240"), (100, "75")])
def test_Soak_TakesNoMoreThanThereIs(harness, tmp_path, limit, seconds):
    (tmp_path / "gpu_layer").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "gpu_layer").chmod(0o755)
    soak = harness.items()[-1]
    assert harness.run_item(tmp_path, soak, False, None, limit, 470)[::2] == ("passed", f"soak {seconds}")


def test_Item_ThatPassed_LeavesItsNotesInTheRecord(harness, tmp_path):
    """Which library it was: the versions are nowhere else."""
    script = tmp_path / "gpu_suite"
    script.write_text(
        '#!/bin/sh\nfor i in 1 2; do echo "     NCCL 22809"; echo "ok   a case"; done\necho "2 passed, 0 failed"\n'
    )
    script.chmod(0o755)
    item = next(item for item in harness.items() if item.name == "nccl")
    found = harness.run_item(tmp_path, item, False, None, 200, 470)
    assert found[::2] == ("passed", "NCCL 22809\n2 passed, 0 failed")


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
    """initcheck alone: it also names copies of padding, and reads of what it has not seen a vendor's kernel write."""
    (tmp_path / "reports").write_text(reports)
    (tmp_path / "compute-sanitizer").write_text(f'#!/bin/sh\necho "$@"\ncat {tmp_path}/reports\necho the end\nexit 3\n')
    (tmp_path / "compute-sanitizer").chmod(0o755)
    monkeypatch.setattr(harness, "find_sanitizer", lambda: str(tmp_path / "compute-sanitizer"))
    item = next(item for item in harness.items() if item.name == f"routing under {tool}")
    got, _, text = harness.run_item(tmp_path, item, False, None, 200, 470)
    assert got == outcome
    assert text.endswith("the end\n" if tool == "memcheck" else "the end")
    if tool == "memcheck":
        program = tmp_path / "gpu_suite"
        assert text.startswith(f"--tool memcheck --report-api-errors no --error-exitcode 3 {program} routing\n")
    elif outcome == "failed":
        assert text.startswith(OF_OURS)
        assert "1 such reads" in text


def test_Build_FromAnotherMachine_IsTakenWhereItStarts(harness, tmp_path, monkeypatch, capsys):
    """Carried without modes; what does not start is built again."""
    made = []
    monkeypatch.setattr(harness, "commands", lambda *_: made.append(1) or [])
    monkeypatch.setattr(harness, "source_hash", lambda fake: "now")
    monkeypatch.setattr(harness, "find_nvcc", lambda: "nvcc")
    (tmp_path / "built").write_text("now")
    for program in ("gpu_suite", "gpu_layer"):
        (tmp_path / program).write_text("#!/bin/sh\nexit 0\n")
        (tmp_path / program).chmod(0o644)
    (tmp_path / "nothing.c").write_text("int nothing;\n")
    library = tmp_path / "libsluice.so.0"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "nothing.c"], check=True)
    assert harness.build("now", tmp_path, False) is None
    assert made == []
    library.write_text("of another machine")
    assert harness.build("now", tmp_path, False) is None
    assert made == [1]
    assert "does not start on this machine" in capsys.readouterr().out


def test_Item_ThatTakesTooLong_EndsWithWhatItStarted(harness, tmp_path):
    script = tmp_path / "starter"
    script.write_text("#!/bin/sh\necho begun\nsleep 3000 &\nwait\n")
    script.chmod(0o755)
    began = time.monotonic()
    code, text = harness.run_within([str(script)], None, 4)
    assert (code, text) == (None, "begun\n")
    assert time.monotonic() - began < 200


def test_NvccFlags_OfAnOlderNvcc_LeaveOutWhatItDoesNotKnow(harness):
    newest, older = harness.nvcc_flags((13, 0)), harness.nvcc_flags((12, 4))
    assert [flag for flag in newest if flag not in older] == ["-gencode=arch=compute_100,code=sm_100"]
    assert harness.nvcc_flags((12, 8)) == newest == harness.nvcc_flags(None)
    assert any("code=compute_80" in flag for flag in older)  # PTX for what comes later


def test_LibraryPath_HasNvidiasPackagesOfThisPython(harness, tmp_path, monkeypatch):
    (tmp_path / "nvidia/cu13/lib").mkdir(parents=True)
    (tmp_path / "nvidia/nccl/lib").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    found = harness.library_path(None).split(":")
    assert found[0] == "/somewhere"
    assert {str(tmp_path / "nvidia/cu13/lib"), str(tmp_path / "nvidia/nccl/lib")} <= set(found)


def test_Wheels_OfWhatThisPythonLacks_AreUnpackedOutOfTheNetwork(harness, tmp_path, monkeypatch):
    wheel = tmp_path / "wheels" / "carriedbysluice-1-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        info = "carriedbysluice-1.dist-info"
        archive.writestr("carriedbysluice.py", "value = 7\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: carriedbysluice\nVersion: 1\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(harness, "CARRIED", ("carriedbysluice", "json"))
    site = harness.unpack_wheels(wheel.parent, tmp_path)
    assert (site / "carriedbysluice.py").exists()
    assert harness.environment_of(True, tmp_path, site)["PYTHONPATH"].split(":")[0] == str(site)
    assert harness.unpack_wheels(tmp_path / "none", tmp_path) is None


@pytest.mark.full
@pytest.mark.timeout(600)
def test_Kernels_KeepTheirArraysInRegisters(harness, tmp_path):
    """One that the compiler cannot unroll lies in local memory, which is the device's: several times slower."""
    nvcc, ptx = harness.find_nvcc(), tmp_path / "kernels.ptx"
    if nvcc is None:
        pytest.skip("no nvcc here")
    flags = [
        flag
        for flag in harness.nvcc_flags(None)
        if "gencode" not in flag and flag != "-fatbin" and "compress" not in flag
    ]
    source = f"{harness.KERNELS}/sluice_kernels.cu"
    command = [nvcc, "-ptx", "-arch=sm_90", *flags, "-I.", "-o", ptx, source]
    subprocess.run(command, cwd=harness.ROOT, check=True, timeout=550)
    text, entry, found = ptx.read_text(), None, []
    for line in text.split("\n"):
        entry = match[1] if (match := re.search(r"\.entry (\w+)\(", line)) else entry
        found += [entry] if re.search(r"^\s*\.local ", line) else []
    assert "sluice_activation_forward_bf16" in text
    assert found == []


@pytest.mark.full
@pytest.mark.timeout(2000)
def test_Fake_BuildsAndRunsEveryItemOnThisCpu(harness, tmp_path):
    """The harness whole, without a GPU: the same programs, lists, record and end."""
    record = tmp_path / "record.json"
    done = run("--fake", "--fresh", "--record", str(record), timeout=1500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.fullmatch(r"\d+ passed, 0 failed", done.stdout.strip().split("\n")[-1])
    outcomes = {name: item["outcome"] for name, item in json.loads(record.read_text())["items"].items()}
    assert sorted(outcomes) == sorted(item.name for item in harness.items(True))
    skipped = {name for name, outcome in outcomes.items() if outcome == "skipped"}
    assert skipped <= {item.name for item in harness.items(True) if item.tool is not None or item.program[-3:] == ".py"}
    if all(importlib.util.find_spec(name) for name in ("torch", "cffi")):  # the package is the one that was built here
        assert "gradients against PyTorch" not in skipped
        assert not [name for name in skipped if name.startswith("benchmark")]
    assert "failed" not in outcomes.values()
    again = run("--fake", "--record", str(record), timeout=450)
    assert again.stdout.count("passed before") == len(outcomes) - len(skipped)


@pytest.mark.full
def test_Run_OfThisMachine_PassesOrSaysThatThereIsNoGpu(tmp_path):
    done = run("--part", "1/11", "--record", str(tmp_path / "record.json"))
    if done.returncode == NO_GPU:
        assert "no GPU" in done.stdout
        assert not (tmp_path / "record.json").exists()
        pytest.skip("no GPU here: " + done.stdout.strip().split("\n")[-2][:200])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
