"""The GPU harness, as far as it goes without a GPU: its lists, its build, its refusal. What needs one skips aloud."""

import importlib.machinery
import importlib.util
import json
import pathlib
import subprocess
import sys

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
    query = 'kind("source file", deps(//backend/cts/gpu:gpu_suite))'
    done = subprocess.run(
        ["bazel", "query", "--noshow_progress", query], cwd=root, capture_output=True, text=True, check=True
    )
    labels = [line[2:].replace(":", "/") for line in done.stdout.split("\n") if line.startswith("//")]
    wanted = sorted(label for label in labels if label.endswith(".c"))
    assert len(wanted) > 10
    assert harness.sources() == wanted, "write these into integration_tests/gpu/sources.txt"
    listed = {str(path.relative_to(root)) for path in harness.device_sources()}
    device = {label for label in labels if "/cuda/kernels/" in label}
    assert device == listed


def test_Parts_CoverEveryItemOnce(harness):
    names = [name for name, _, _ in harness.items()]
    assert len(names) == len(set(names)) >= 10
    for count in (1, 2, 3, 7, 40):
        found = [name for i in range(count) for name, _, _ in harness.chosen(f"{i + 1}/{count}")]
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


def test_Dry_CompilesEverySourceAndLinksOnce(harness):
    lines = run("--dry").stdout.strip().split("\n")
    for source in harness.sources():
        assert sum(f" -c {source} " in line for line in lines) == 1
    assert sum("sluice_kernels.cu" in line for line in lines) == 1
    assert lines[-1].endswith("/gpu_suite")


def test_Suite_HasThePartsThatTheHarnessRuns(harness, root):
    text = (root / "backend/cts/gpu/gpu_suite_main.c").read_text()
    assert all(f'"{part}", part_{part}' in text for part in harness.PARTS)


def test_Record_RepeatsOnlyWhatDidNotPass(harness, tmp_path, monkeypatch, capsys):
    """The loop over items with a stand-in for the program: one fails first, passes then."""
    script, log = tmp_path / "program", tmp_path / "log"
    script.write_text(
        f'#!/bin/sh\necho "$1" >>{log}\n'
        f'[ "$1" = gemm ] && [ ! -e {tmp_path}/again ] && exit 1\n'
        'echo "3 passed, 0 failed"\n'
    )
    script.chmod(0o755)
    record = tmp_path / "record.json"
    monkeypatch.setattr(harness, "build", lambda now: script)
    monkeypatch.setattr(harness, "versions", dict)
    monkeypatch.setattr(harness, "SANITIZED", [])
    monkeypatch.setattr(sys, "argv", ["run", "--record", str(record)])
    assert harness.main() == 1
    assert capsys.readouterr().out.endswith("4 passed, 1 failed\n")
    assert json.loads(record.read_text())["items"]["gemm"]["outcome"] == "failed"
    (tmp_path / "again").touch()
    assert harness.main() == 0
    assert capsys.readouterr().out.endswith("5 passed, 0 failed\n")
    assert log.read_text().split() == [*harness.PARTS, "gemm"]


@pytest.mark.full
def test_Run_OfThisMachine_PassesOrSaysThatThereIsNoGpu(tmp_path):
    done = run("--part", "1/11", "--record", str(tmp_path / "record.json"))
    if done.returncode == NO_GPU:
        assert "no GPU" in done.stdout
        assert not (tmp_path / "record.json").exists()
        pytest.skip("no GPU here: " + done.stdout.strip().split("\n")[-2][:200])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
