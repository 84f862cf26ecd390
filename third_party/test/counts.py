# SPDX-License-Identifier: Apache-2.0
"""Counts tests for the last line of ./test.

counts.py bazel BUILD_EVENTS.json EXIT_CODE [OPTION...]   prints "passed failed skipped" of Bazel's tests, case by case
counts.py pytest JUNIT.xml EXIT_CODE [OPTION...]          the same of pytest

OPTIONs are those of the run. Failures are printed to stderr, one per line, with skips that skips.txt does not allow
here. A run that broke before its tests, or ran none, counts as one failure.
"""

import json
import os
import re
import sys
import urllib.parse
import xml.etree.ElementTree

import skips

# Of several ranks under mpirun, only the first is counted.
OTHER_RANK = re.compile(r"\[1,[1-9]\d*\]<")
CMOCKA = re.compile(r"\[ +(RUN|OK|FAILED|SKIPPED) +\] (.*)")
REASON = re.compile(r"SKIPPED: (.*)")


class Counts:
    def __init__(self, options, lines):
        self.passed = self.failed = self.skipped = 0
        self._options, self._lines = options, lines

    def skip(self, test, reason):
        if skips.is_allowed(test, reason, self._options, self._lines):
            self.skipped += 1
        else:
            self.failed += 1
            print(
                f"  {test} was skipped, which skips.txt does not allow here: {reason or 'no reason'}", file=sys.stderr
            )


def cases(log):
    """Returns (passed, failed, [(case, reason) of each skip]) of a log; a program without cmocka may skip entirely."""
    passed = failed = 0
    skipped, running, reason = [], None, ""
    try:
        with open(log, errors="replace") as file:
            for line in file:
                if OTHER_RANK.match(line):
                    continue
                if found := REASON.search(line):
                    reason = found[1].strip()
                elif found := CMOCKA.search(line):
                    word, name = found[1], found[2].strip()
                    if word == "RUN":
                        running, reason = name, ""
                    elif name == running:  # the lists at the end of a group name cases again
                        passed += word == "OK"
                        failed += word == "FAILED"
                        skipped += [(name, reason)] if word == "SKIPPED" else []
                        running = None
    except OSError:
        pass
    if reason and not passed + failed + len(skipped) and running is None:
        skipped = [("as a whole", reason)]
    return passed, failed, skipped


def count_bazel(path, exit_code, counts):
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
    for label, outcome in sorted(status.items()):
        good, bad, skipped = cases(logs.get(label, ""))
        if outcome in ("PASSED", "FLAKY"):
            counts.passed += good if good or skipped else 1
        else:
            print(f"  {label}: {outcome}, log: {logs.get(label, 'none')}", file=sys.stderr)
            counts.passed += good
            counts.failed += max(bad, 1)
        for case, reason in skipped:
            counts.skip(f"{label} {case}", reason)
    if exit_code != 0 and counts.failed == 0:
        print(f"  bazel ended with {exit_code}: a target did not build", file=sys.stderr)
        counts.failed = 1
    if not status and counts.failed == 0:
        print("  bazel ran no test", file=sys.stderr)
        counts.failed = 1


def count_pytest(path, exit_code, counts):
    try:
        suites = xml.etree.ElementTree.parse(path).getroot().iter("testcase")
    except (OSError, xml.etree.ElementTree.ParseError):
        suites = ()
    for case in suites:
        name = f"{case.get('classname')}.{case.get('name')}"
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            counts.failed += 1
            print(f"  {name}", file=sys.stderr)
        elif "skipped" in kinds:
            skip = case.find("skipped")
            # A file that is skipped during collection has its reason in the text.
            counts.skip(name, skip.get("message", "").removeprefix("collection skipped") or skip.text or "")
        else:
            counts.passed += 1
    if counts.failed == 0 and (exit_code != 0 or counts.passed + counts.skipped == 0):
        print(f"  pytest ended with {exit_code} after {counts.passed} passed tests", file=sys.stderr)
        counts.failed = 1


def main():
    kind, path, exit_code, options = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]
    counts = Counts(options, skips.read())
    {"bazel": count_bazel, "pytest": count_pytest}[kind](path, exit_code, counts)
    print(counts.passed, counts.failed, counts.skipped)


if __name__ == "__main__":
    main()
