# SPDX-License-Identifier: Apache-2.0
"""Tests that third_party/size/measure.py counts every tracked file once, and that all areas have files."""

import importlib.util
import os

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FOLDER = os.path.join(ROOT, "third_party", "size")
spec = importlib.util.spec_from_file_location("measure", os.path.join(FOLDER, "measure.py"))
measure = importlib.util.module_from_spec(spec)
spec.loader.exec_module(measure)
with open(os.path.join(FOLDER, "areas.txt")) as file:
    KNOWN = measure.rules(file.read())


def test_Areas_EveryTrackedFile_HasOne():
    lines, counts, unknown = measure.measure(measure.files(None), KNOWN)
    assert unknown == []
    assert {area for area, _ in KNOWN} == set(lines)
    assert sum(counts.values()) > 1000 and lines["product-backend"] > 50_000


def test_Areas_FirstLineThatFits_TakesThePath():
    known = measure.rules("# c\ntests */test/*\nproduct backend/\n")
    contents = [("backend/a/test/b.c", b"1\n2\n"), ("backend/a/b.c", b"1\n"), ("gone.c", b"1\n")]
    assert measure.measure(contents, known) == ({"tests": 2, "product": 1}, {"tests": 1, "product": 1}, ["gone.c"])
