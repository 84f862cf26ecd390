# SPDX-License-Identifier: Apache-2.0
"""Compares covered.txt, the short checks that replace tests of --full, with the tests' markers."""

import os


def read():
    """Returns {function of a test: its short check, or `none` and a reason}."""
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "covered.txt")) as file:
        return dict(line.strip().split(": ", 1) for line in file if line.strip() and not line.startswith("#"))


def complaints(cases, listed):
    """Returns errors. cases: (function of a test, whether it runs with --full alone) of each case of all tests."""
    every = {function for function, _ in cases}
    daily = {function for function, is_full in cases if not is_full}
    full = every - daily
    found = [f"{name}: runs with --full alone, and no line says what is checked instead" for name in full - {*listed}]
    for name, instead in listed.items():
        if name not in full:
            found.append(f"{name}: {'runs every day too' if name in daily else 'is not there'}")
        elif not instead.startswith(("none, ", "//")) and instead not in daily:
            found.append(f"{name}: {instead}, which runs instead, is not of every day")
    return sorted(found)
