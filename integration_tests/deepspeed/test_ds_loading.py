# SPDX-License-Identifier: Apache-2.0
"""Tests how Sluice is loaded, by the entry point and by the launcher wrapper, without effect on other processes."""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HOOKED = (
    "import deepspeed.runtime.engine as e; "
    "print(hasattr(e.DeepSpeedEngine._configure_distributed_model, '_sluice_original'))"
)


def python(*arguments: str, folder: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a new Python interpreter."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "DS_ACCELERATOR": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=200,
        cwd=folder,
    )


def test_ImportTorch_LoadsNothingHeavy() -> None:
    code = """
import sys, torch
names = [name for name in sys.modules if name.startswith(("sluice", "deepspeed"))]
print(sorted(names), any(type(f).__module__ == "sluice.autoload" for f in sys.meta_path))
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    light = ["sluice", "sluice._version", "sluice.autoload", "sluice.trace", "sluice.version", "sluice_autoload"]
    assert done.stdout.strip() == f"{light} True"


@pytest.mark.parametrize("first", ["import torch, deepspeed", "import deepspeed", "import torch, sluice"])
def test_Entry_AnyOrderOfImports_WrapsTheEngine(first: str) -> None:
    source = "import inspect; print(len(inspect.getsource(e)) > 1000, e.__spec__.loader)"
    done = python("-c", f"{first}; {HOOKED}; {source}")
    hooked, loader = done.stdout.strip().splitlines()[-2:]
    assert hooked == "True", done.stderr
    assert loader.startswith("True <_frozen_importlib_external.SourceFileLoader"), "the host's source is not at hand"


def test_Entry_SwitchedOffByTorch_LoadedLaterByHand() -> None:
    code = f"{HOOKED}; from sluice import autoload; autoload.load(); autoload.load(); {HOOKED}"
    done = python("-c", code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout.strip().splitlines()[-2:] == ["False", "True"], done.stdout + done.stderr


def test_Entry_EngineChanged_ImportsStillWorkAndTheProblemIsSaid() -> None:
    code = """
import sluice.autoload as a
a.TARGETS["deepspeed.runtime.engine"] = "no.such.module"
import torch, deepspeed
print(len(a.problems))
"""
    done = python("-c", code)
    assert done.returncode == 0 and done.stdout.strip().endswith("1")
    assert "could not be prepared" in done.stderr and "doctor" in done.stderr


def test_Run_Script_GetsItsArgumentsAndTheHook(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import sys, os; print(sys.argv, __name__, os.environ.get('SLUICE')); {HOOKED}\n")
    arguments = ["-m", "sluice.run", "--local_rank=1", "--require", str(script), "--lr", "1"]
    done = python(*arguments, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr
    expected = [str(script), "--local_rank=1", "--lr", "1"]
    assert f"{expected} __main__ require" in done.stdout and done.stdout.strip().endswith("True")


def test_Run_LibraryMissing_DoesNotStartTheScript(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('started')\n")
    done = python("-m", "sluice.run", str(script), SLUICE_LIBRARY=str(tmp_path / "libsluice.so.0"))
    assert done.returncode != 0 and "started" not in done.stdout
    assert "the C library does not load" in done.stderr


def test_Run_NoScript_SaysSo(tmp_path: Path) -> None:
    assert "there is no file nothing.py" in python("-m", "sluice.run", "nothing.py", folder=tmp_path).stderr
    assert "usage:" in python("-m", "sluice.run", folder=tmp_path).stderr


def _doctor(**environment: str) -> tuple[int, dict[str, Any]]:
    done = python("-m", "sluice", "doctor", "--json", **environment)
    report = json.loads(done.stdout)
    return done.returncode, {"healthy": report["healthy"], **{item["check"]: item for item in report["findings"]}}


def test_Doctor_Installed_IsReady() -> None:
    code, report = _doctor()
    assert (code, report["healthy"]) == (0, True), report
    for check in ("python", "sluice", "library", "device", "self-check in C", "gemm", "torch", "communicator"):
        assert report[check]["state"] == "ok", report[check]
    for check in ("torch adapter", "loader", "switch", "deepspeed", "hook"):
        assert report[check]["state"] in ("ok", "note"), report[check]
    assert "would be swapped" in report["deepspeed"]["detail"]


def _checked(checks: str, **environment: str) -> list[dict[str, str]]:
    """Returns the findings of some of the doctor's checks. All checks would import every host, which is slow."""
    code = f"""
import json, sluice.doctor as d
from dataclasses import asdict
print(json.dumps([asdict(found) for check in ({checks}) for found in check()]))
"""
    done = python("-c", code, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_Doctor_LoaderOffAndOptionsInTheEnvironment_AreNoted() -> None:
    loader, switch = _checked("d._loader, d._switch", TORCH_DEVICE_BACKEND_AUTOLOAD="0", SLUICE="0")
    assert "sluice.run" in loader["advice"]
    assert switch["state"] == "note" and "SLUICE=0" in switch["detail"]
    (options,) = _checked("d._options,", SLUICE_OPTIONS='{"chunks": 2, "memory_budget": "1GiB"}')
    assert options["state"] == "ok"
    assert "chunks 2 | policy chosen to fit | memory_budget 1 GiB" in options["detail"]


def test_Doctor_LibraryMissingAndMistakenOptions_SaysWhatToDoAndFails() -> None:
    code, report = _doctor(SLUICE_LIBRARY="/nowhere/libsluice.so.0", SLUICE_OPTIONS='{"chnks": 2}')
    assert (code, report["healthy"]) == (1, False)
    assert report["library"]["state"] == "bad" and "/nowhere/libsluice.so.0" in report["library"]["detail"]
    assert report["options"]["state"] == "bad"
    assert "chnks" in report["options"]["detail"] and '"chunks"' in report["options"]["detail"]


def test_Doctor_WithoutTorch_SaysWhatToInstall() -> None:
    code = """
import json, sluice.doctor as d
real = d.installed_version
d.installed_version = lambda name: None if name == "torch" else real(name)
found = [f for check in (d._torch, d._torch_adapter, d._loader) for f in check()]
print(json.dumps([[f.check, f.state, f.detail, f.advice] for f in found]))
"""
    torch, loader = json.loads(python("-c", code).stdout.strip().splitlines()[-1])
    assert torch[:2] == ["torch", "bad"] and "install torch" in torch[3]
    assert loader[:2] == ["loader", "ok"] and "0.0" not in loader[2]


def test_CommandLine_Unknown_SaysWhatThereIs() -> None:
    done = python("-m", "sluice", "docter")
    assert done.returncode == 2 and "doctor" in done.stderr
    assert python("-m", "sluice", "version").stdout.strip()


def _launch(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs DeepSpeed's own launcher with two ranks on the CPU."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    here = Path(sys.executable).parent
    return python(
        *[str(here / "deepspeed"), "--num_gpus", "2", "--master_port", str(port), *arguments],
        PATH=f"{here}:{os.environ['PATH']}",
        **environment,
    )


EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "text_lm"


@pytest.mark.full
@pytest.mark.timeout(900)
def test_Launcher_ExampleWithItsConfigAsPathAndAsBase64_TrainsOnSluiceAsStock() -> None:
    """Runs a user's script three times, once by the module sluice.run. The key reaches every rank with both forms of
    the config."""
    config = EXAMPLE / "ds_config.json"
    coded = base64.urlsafe_b64encode(config.read_bytes()).decode()
    losses = {}
    for name, given, module, environment in (
        ("path", str(config), ["--module", "sluice.run"], {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}),
        ("base64", coded, [], {}),
        ("stock", str(config), [], {"SLUICE": "0"}),
    ):
        arguments = [*module, str(EXAMPLE / "train.py"), "--steps", "2", "--config", given]
        done = _launch(*arguments, **environment)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        assert done.stdout.count("3 of 3 MoE layers run on Sluice") == (name != "stock"), done.stdout[-2000:]
        losses[name] = [float(found) for found in re.findall(r"step +\d+  loss ([0-9.]+)", done.stdout)]
        assert len(losses[name]) == 2 and 3 < losses[name][0] < 6, done.stdout[-2000:]
    for name in ("path", "base64"):
        assert losses[name] == pytest.approx(losses["stock"], abs=2e-4)  # losses are printed with 4 decimals
