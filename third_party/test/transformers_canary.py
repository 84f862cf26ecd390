#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Finds tests of Sluice that break with the newest transformers, accelerate and peft of the package index.

.venv/bin/python third_party/test/transformers_canary.py [PACKAGE[==VERSION] ...] [-- PYTEST_OPTION ...]

Installs the packages (default: those three) into a scratch environment that takes all others from .venv, with torch,
against which Sluice's adapters are compiled. Then runs integration_tests/transformers there. Tests that do not pass run
again there, and with the pinned releases; each test whose outcomes differ is listed with both. Exit status: 0 no test
broke, 1 some broke, 2 the packages cannot be tried.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUITE = "integration_tests/transformers"
RECORD = "SLUICE_CANARY_RECORD"
WORST = ("passed", "skipped", "failed")  # of setup, call and teardown


def pytest_runtest_logreport(report):
    """Records one line for each phase of a test (this file is a pytest plugin)."""
    _record(report.nodeid, "failed" if report.outcome == "passed" and hasattr(report, "wasxfail") else report.outcome)


def pytest_collectreport(report):
    """Records a file that cannot be imported as failed, instead of its tests."""
    if report.outcome == "failed":
        _record(report.nodeid, "failed")


def _record(test, outcome):
    with open(os.environ[RECORD], "a") as file:
        file.write(json.dumps([test, outcome]) + "\n")


def outcomes(lines):
    """Returns the worst outcome of each test."""
    found = {}
    for test, outcome in map(json.loads, lines):
        found[test] = max(found.get(test, "passed"), outcome, key=WORST.index)
    return found


def tests_of(python, tests, options):
    """Runs tests with this interpreter, and returns their outcomes."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record"
        record.touch()
        environment = dict(os.environ, PYTHONPATH=str(Path(__file__).parent), **{RECORD: str(record)})
        command = [python, "-m", "pytest", "-q", "-p", "transformers_canary", *tests, *options]
        subprocess.run(command, cwd=ROOT, env=environment, check=False)
        return outcomes(record.read_text().splitlines())


def collected(python, options):
    """Returns the tests that pytest collects with this interpreter."""
    command = [python, "-m", "pytest", "-q", "--collect-only", SUITE, *options]
    said = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False).stdout
    return {line for line in said.splitlines() if line.startswith(SUITE) and "::" in line}


def differences(pinned, newest):
    """Returns (test, outcome with pinned releases, with newest ones) of each test that passes with pinned ones only."""
    return [
        (test, outcome, newest.get(test, "not collected"))
        for test, outcome in sorted(pinned.items())
        if outcome == "passed" and newest.get(test) != "passed"
    ]


def _versions(python, packages):
    code = "import importlib.metadata as m, sys; print(' '.join(f'{p} {m.version(p)}' for p in sys.argv[1:]))"
    said = subprocess.run([python, "-c", code, *packages], stdout=subprocess.PIPE, text=True, check=True)
    return said.stdout.strip()


def install(pinned, folder, packages):
    """Makes the scratch environment, and returns its interpreter; None if the packages cannot be installed."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([pinned, "-m", "venv", folder], check=True)
    python = str(folder / "bin" / "python")
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own, others = (
        subprocess.run([each, "-c", where], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
        for each in (python, pinned)
    )
    (Path(own) / "pinned.pth").write_text(f"import site; site.addsitedir({others!r})\n")
    quiet = ["--disable-pip-version-check", "--quiet", "--no-input", "--progress-bar", "off"]
    command = [python, "-m", "pip", "install", *quiet, "--upgrade", *packages]
    return python if subprocess.run(command, check=False).returncode == 0 else None


def main(arguments):
    options = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    packages = arguments[: len(arguments) - len(options) - ("--" in arguments)] or [
        "transformers",
        "accelerate",
        "peft",
    ]
    names = [package.partition("==")[0] for package in packages]
    pinned = str(ROOT / ".venv/bin/python")
    python = install(pinned, ROOT / ".venv/transformers-canary", packages)
    if python is None:
        print(f"canary: {' '.join(packages)} cannot be installed")
        return 2
    before, now = _versions(pinned, names), _versions(python, names)
    print(f"canary: {now} (pinned: {before})", flush=True)
    newest = tests_of(python, [SUITE], options)
    there = collected(pinned, options)
    if not newest or not there:
        print("canary: no test ran")
        return 2
    suspects = sorted(test for test in there if newest.get(test) != "passed")
    broken = []
    if suspects:
        again = tests_of(python, [test for test in suspects if test in newest], []) if newest.keys() & suspects else {}
        broken = differences(tests_of(pinned, suspects, []), {**newest, **again})
    for test, old, new in broken:
        print(f"  {test}: {old} with the pinned releases, {new} with the newest")
    passed = len(there) - len(suspects)
    print(f"canary: {now}: {len(there)} tests, {passed} passed at once, {len(broken)} broke (pinned: {before})")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
