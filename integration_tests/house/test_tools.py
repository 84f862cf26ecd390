# SPDX-License-Identifier: Apache-2.0
"""Tests the repository's own tools: the counts of ./test, its allowed skips, and the counts of lines by area."""

import json
import os
import re
import subprocess
import sys

import pytest

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "third_party", "test"))
sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "third_party", "size"))
import covered
import measure
import skips


def count(root, kind, path, code, *options):
    """Returns the output of counts.py, and its errors."""
    command = [
        sys.executable,
        os.path.join(root, "third_party", "test", "counts.py"),
        kind,
        str(path),
        str(code),
        *options,
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip(), done.stderr


def bazel_events(folder, outcomes):
    """Writes a build-event file in Bazel's form, with one log per test."""
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


def cmocka(*results, rank=""):
    """Returns the log of a program whose cases have these results: OK, FAILED, or the reason of a skip."""
    words = [result if result in ("OK", "FAILED") else "SKIPPED" for result in results]
    lines = [f"[==========] Running {len(results)} test(s)."]
    for i, (word, result) in enumerate(zip(words, results)):
        lines += [f"[ RUN      ] A_Case_{i}"] + ([f"SKIPPED: {result}"] if word == "SKIPPED" and result else [])
        lines += [f"[{word:>9} ] A_Case_{i}"]
    for word in ("SKIPPED", "FAILED"):  # the lists at the end, which name the cases again
        named = [f"[{word:>9} ] A_Case_{i}" for i in range(len(words)) if words[i] == word]
        lines += [f"[{word:>9} ] {len(named)} test(s), listed below:", *named] if named else []
    return "".join(f"{rank}{line}\n" for line in lines)


FULL = "needs SLUICE_FULL"
RANKS = "".join(cmocka("OK", "OK", FULL, rank=f"[1,{rank}]<stdout>:") for rank in (0, 1, 10))


@pytest.mark.parametrize(
    ("outcomes", "code", "expected", "complaint"),
    [
        ({}, 4, "0 1 0", "did not build"),
        ({"//a:t": ("PASSED", cmocka("OK", "OK")), "//b:t": ("PASSED", "plain\n")}, 0, "3 0 0", ""),
        ({"//a:t": ("FAILED", cmocka("OK", "FAILED", "OK"))}, 3, "2 1 0", "//a:t: FAILED"),
        ({"//a:t": ("TIMEOUT", "[ RUN      ] X\n")}, 3, "0 1 0", "//a:t: TIMEOUT"),
        ({"//a:t": ("PASSED", cmocka("OK"))}, 1, "1 1 0", "did not build"),
        ({"//a:t": ("NO_STATUS", ""), "//b:t": ("PASSED", "plain\n")}, 1, "1 1 0", "//a:t: NO_STATUS"),
        ({"//a:t": ("PASSED", cmocka(FULL, FULL))}, 0, "0 0 2", ""),
        ({"//a:t": ("PASSED", cmocka("OK", ""))}, 0, "1 1 0", "//a:t A_Case_1 was skipped, which"),
        ({"//a:t": ("PASSED", cmocka("the moon is full"))}, 0, "0 1 0", "//a:t A_Case_0 was skipped"),
        ({"//a:t": ("PASSED", "SKIPPED: the moon is full\n")}, 0, "0 1 0", "//a:t as a whole was skipped"),
        ({"//a:t": ("PASSED", RANKS)}, 0, "2 0 1", ""),
        ({"//a:t": ("FAILED", cmocka(FULL, "FAILED"))}, 3, "0 1 1", "//a:t: FAILED"),
    ],
    ids=[
        *("nothing_ran", "all_pass", "one_case_fails", "hangs", "a_target_does_not_build", "not_run", "all_skip"),
        *("no_reason", "not_listed", "a_whole_program", "ranks_of_mpi", "skips_and_fails"),
    ],
)
def test_Counts_OfBazel_AreOfCases(root, tmp_path, outcomes, code, expected, complaint):
    found, said = count(root, "bazel", bazel_events(tmp_path, outcomes), code)
    assert found == expected
    assert complaint in said and bool(said) == bool(complaint)


LONG = '<testcase classname="a" name="t"><skipped message="takes long: runs with --full"/></testcase>'
MOON = '<skipped message="collection skipped">("a.py", 1, "Skipped: the moon is full")</skipped>'
OTHER = f'<testcase classname="a" name="t">{MOON}</testcase>'


@pytest.mark.parametrize(
    ("cases", "code", "expected"),
    [
        (None, 4, "0 1 0"),
        ("", 5, "0 1 0"),
        ("<testcase/>" + LONG, 0, "1 0 1"),
        ("<testcase/>" + OTHER, 0, "1 1 0"),
        ("<testcase/><testcase><failure/></testcase><testcase><error/></testcase>", 1, "1 2 0"),
        ("<testcase/>", 3, "1 1 0"),
    ],
    ids=["no_report", "nothing_ran", "skip_is_no_pass", "not_listed", "failures", "broke_off"],
)
def test_Counts_OfPytest_AreOfTests(root, tmp_path, cases, code, expected):
    path = tmp_path / "junit.xml"
    if cases is not None:
        path.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    found, said = count(root, "pytest", path, code)
    assert found == expected
    assert ("a.t was skipped" in said and "moon" in said) == (cases is not None and "moon" in cases)


def test_Skips_ByOptionsOfTheRun_AreAllowedOnlyWithoutThem(root, tmp_path):
    """A run with --full may not skip the tests that only it runs."""
    events = bazel_events(tmp_path, {"//a:t": ("PASSED", cmocka("OK", FULL))})
    assert count(root, "bazel", events, 0)[0] == "1 0 1"
    assert count(root, "bazel", events, 0, "--test_env=SLUICE_FULL=1", "//...")[0] == "1 1 0"
    races = bazel_events(tmp_path, {"//a:t": ("PASSED", cmocka("OK", "ThreadSanitizer: a race"))})
    assert count(root, "bazel", races, 0, "--config=tsan")[0] == "1 0 1"
    assert count(root, "bazel", races, 0, "--config=asan")[0] == "1 1 0"
    path = tmp_path / "junit.xml"
    path.write_text(f"<testsuites><testsuite><testcase/>{LONG}</testsuite></testsuites>")
    assert count(root, "pytest", path, 0, "--full")[0] == "1 1 0"


def test_Skips_EachLine_HasAConditionThatThisMachineAnswers(root):
    lines = skips.read()
    assert len(lines) > 20
    for condition, test, reason in lines:
        assert test and reason
        assert skips.holds(condition, []) in (True, False)
    no = [condition for condition, _, _ in lines if condition.startswith("no ")]
    assert all(skips.holds(condition, []) != skips.holds(condition.removeprefix("no "), []) for condition in no)


def test_Skips_OfC_AllGiveAReason(root):
    bare = subprocess.run(
        ["git", "grep", "-nwE", r"skip\(\)", "--", "*.c", "*.cc", "*.inc"], cwd=root, capture_output=True, text=True
    )
    assert bare.stdout == ""  # skip_because of third_party/bazel/test.h


def test_Covered_LinesAndMarkersThatDiffer_AreNamed():
    cases = [("long", True), ("short", False), ("both", True), ("both", False), ("forgotten", True)]
    listed = {"long": "short", "both": "short", "gone": "none, it is not there", "forgotten": "long"}
    assert covered.complaints(cases, {"long": "short", "forgotten": "//a:b"}) == []
    assert [line.split(":")[0] for line in covered.complaints(cases, {"long": "both"})] == ["forgotten"]
    assert covered.complaints(cases, listed) == [
        "both: runs every day too",
        "forgotten: long, which runs instead, is not of every day",
        "gone: is not there",
    ]


def test_Covered_EachTestThatALineNames_IsThere(root):
    """The test does not collect them; a complete run does."""
    for name in {name for line in covered.read().items() for name in line if "::" in name}:
        path, function = name.split("::")
        with open(os.path.join(root, path)) as file:
            assert re.search(rf"def {function}\(|^from pair_ranks import \*", file.read(), re.MULTILINE), name


def test_Areas_EveryTrackedFile_HasOne():
    with open(measure.HERE / "areas.txt") as file:
        known = measure.rules(file.read())
    lines, counts, unknown = measure.measure(measure.files(None), known)
    assert unknown == []
    assert {area for area, _ in known} == set(lines)
    assert sum(counts.values()) > 1000 and lines["product-backend"] > 50_000
