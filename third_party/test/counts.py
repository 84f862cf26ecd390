"""Counts what ran, for the last line of ./test.

counts.py bazel BUILD_EVENTS.json EXIT_CODE     prints "passed failed" of Bazel's tests, case by case
counts.py pytest JUNIT.xml EXIT_CODE            the same of pytest

What failed goes to stderr, a line each. A run that broke before its tests, or ran none, counts as one failure.
"""

import json
import os
import re
import sys
import urllib.parse
import xml.etree.ElementTree

CMOCKA_PASSED = re.compile(r"^\[  PASSED  \] (\d+) test", re.MULTILINE)
CMOCKA_FAILED = re.compile(r"^\[  FAILED  \] (\d+) test", re.MULTILINE)


def cases(log):
    """(passed, failed) that a cmocka log lists; (0, 0) for other programs."""
    try:
        with open(log, errors="replace") as file:
            text = file.read()
    except OSError:
        return 0, 0
    return sum(map(int, CMOCKA_PASSED.findall(text))), sum(map(int, CMOCKA_FAILED.findall(text)))


def count_bazel(path, exit_code):
    status, logs = {}, {}
    if os.path.exists(path):
        with open(path) as file:
            for line in file:
                event = json.loads(line)
                if "testSummary" in event:
                    status[event["id"]["testSummary"]["label"]] = event["testSummary"]["overallStatus"]
                for output in event.get("testResult", {}).get("testActionOutput", ()):
                    if output.get("name") == "test.log":
                        label = event["id"]["testResult"]["label"]
                        logs[label] = urllib.parse.unquote(urllib.parse.urlparse(output["uri"]).path)
    passed = failed = 0
    for label, outcome in sorted(status.items()):
        good, bad = cases(logs.get(label, ""))
        if outcome in ("PASSED", "FLAKY"):
            passed += max(good, 1)
        else:
            print(f"  {label}: {outcome}, log: {logs.get(label, 'none')}", file=sys.stderr)
            passed += good
            failed += max(bad, 1)
    if exit_code != 0 and failed == 0:
        print(f"  bazel ended with {exit_code}: a target did not build", file=sys.stderr)
        failed = 1
    if not status and failed == 0:
        print("  bazel ran no test", file=sys.stderr)
        failed = 1
    return passed, failed


def count_pytest(path, exit_code):
    passed = failed = 0
    try:
        suites = xml.etree.ElementTree.parse(path).getroot().iter("testcase")
    except (OSError, xml.etree.ElementTree.ParseError):
        suites = ()
    for case in suites:
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed += 1
            print(f"  {case.get('classname')}.{case.get('name')}", file=sys.stderr)
        elif "skipped" not in kinds:
            passed += 1
    if failed == 0 and (exit_code != 0 or passed == 0):
        print(f"  pytest ended with {exit_code} after {passed} passed tests", file=sys.stderr)
        failed = 1
    return passed, failed


def main():
    kind, path, exit_code = sys.argv[1], sys.argv[2], int(sys.argv[3])
    passed, failed = {"bazel": count_bazel, "pytest": count_pytest}[kind](path, exit_code)
    print(passed, failed)


if __name__ == "__main__":
    main()
