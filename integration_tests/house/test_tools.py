"""The house's own tools: what ./test counts, and what the Bazel formatter refuses."""

import json
import os
import subprocess
import sys

import pytest


def count(root, kind, path, code):
    command = [sys.executable, os.path.join(root, "third_party", "test", "counts.py"), kind, str(path), str(code)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def bazel_events(folder, outcomes):
    """A build-event file as Bazel writes it, with one log a test."""
    events = []
    for label, (status, log) in outcomes.items():
        path = folder / f"{len(events)}.log"
        path.write_text(log)
        output = {"name": "test.log", "uri": path.as_uri()}
        events.append({"id": {"testResult": {"label": label}}, "testResult": {"testActionOutput": [output]}})
        events.append({"id": {"testSummary": {"label": label}}, "testSummary": {"overallStatus": status}})
    path = folder / "events.json"
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


CMOCKA = "[==========] 3 test(s) run.\n[  PASSED  ] %d test(s).\n"


@pytest.mark.parametrize(
    ("outcomes", "code", "expected"),
    [
        ({}, 4, "0 1"),
        ({"//a:t": ("PASSED", CMOCKA % 3), "//b:t": ("PASSED", "plain")}, 0, "4 0"),
        ({"//a:t": ("FAILED", CMOCKA % 2 + "[  FAILED  ] 1 test(s), listed below:\n")}, 3, "2 1"),
        ({"//a:t": ("TIMEOUT", "[ RUN      ] X\n")}, 3, "0 1"),
        ({"//a:t": ("PASSED", CMOCKA % 3)}, 1, "3 1"),
        ({"//a:t": ("NO_STATUS", ""), "//b:t": ("PASSED", "plain")}, 1, "1 1"),
    ],
    ids=["nothing_ran", "all_pass", "one_case_fails", "hangs", "a_target_does_not_build", "not_run"],
)
def test_Counts_OfBazel_AreOfCases(root, tmp_path, outcomes, code, expected):
    assert count(root, "bazel", bazel_events(tmp_path, outcomes), code) == expected


@pytest.mark.parametrize(
    ("cases", "code", "expected"),
    [
        (None, 4, "0 1"),
        ("", 5, "0 1"),
        ("<testcase/><testcase><skipped/></testcase>", 0, "1 0"),
        ("<testcase/><testcase><failure/></testcase><testcase><error/></testcase>", 1, "1 2"),
        ("<testcase/>", 3, "1 1"),
    ],
    ids=["no_report", "nothing_ran", "skip_is_no_pass", "failures", "broke_off"],
)
def test_Counts_OfPytest_AreOfTests(root, tmp_path, cases, code, expected):
    path = tmp_path / "junit.xml"
    if cases is not None:
        path.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert count(root, "pytest", path, code) == expected


GOOD = 'cc_library(\n    name = "a",\n    srcs = ["a.c"],\n    deps = [\n        ":b",\n        "//c",\n    ],\n)\n'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (GOOD, None),
        (GOOD.replace(" = ", "="), GOOD),
        (GOOD.replace('":b"', "':b'"), GOOD),
        (GOOD.replace('        ":b",\n        "//c",\n', '        "//c",\n        ":b",\n'), GOOD),
        (GOOD.replace("    name", "\tname"), GOOD),
        (GOOD + "\n\n\n\n", GOOD),
    ],
    ids=["good", "equals_sign", "quotes", "order", "tab", "end"],
)
def test_BazelFormat_WrittenOtherwise_IsRefusedAndFixed(root, tmp_path, before, after):
    path = tmp_path / "BUILD"
    path.write_text(before)
    command = [sys.executable, os.path.join(root, "third_party", "lint", "bazel_format.py")]
    assert subprocess.run([*command, path], capture_output=True).returncode == (1 if after else 0)
    subprocess.run([*command, "--fix", path], capture_output=True)
    assert path.read_text() == (after or before)
    assert subprocess.run([*command, path], capture_output=True).returncode == 0
