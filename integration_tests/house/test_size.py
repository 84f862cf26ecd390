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
