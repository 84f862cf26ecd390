# SPDX-License-Identifier: Apache-2.0
"""Tests that messages name the value of an enum instead of its number."""

import os
import re

from test_documents import ROOT

# Fields of the ABI whose values have names.
FIELDS = (
    "dtype",
    "param_dtype",
    "grad_dtype",
    "wire_dtype",
    "activation",
    "gated",
    "wgrad_mode",
    "restore_input",
    "restore_pre_activation",
    "chunking",
    "grouping",
    "deduplicate",
    "exchange_mode",
    "grad_mode",
    "drop_policy",
)
NUMBER = re.compile(rf"\b(?:{'|'.join(FIELDS)})\b(?: of \w+(?: %d)? is| is|) %(?:d|lld|i|u)")
# A number without a name is printed as a number, with the allowed values.
REFUSED = re.compile(r"known are|it must be|must be in|use SLUICE_|want a SLUICE_|a schedule is|set it to")
LITERALS = re.compile(r'"(?:[^"\\\n]|\\.)*"(?:\s*"(?:[^"\\\n]|\\.)*")*')
DIFFERS = re.compile(rf"^\s*DIFFERS\((?:{'|'.join(FIELDS)}),", re.MULTILINE)


def bare_numbers(source):
    """Returns messages of a C file that print the number of an enum instead of its name."""
    joined = (re.sub(r'"\s*"', "", found) for found in LITERALS.findall(source))
    found = [message for message in joined if NUMBER.search(message) and not REFUSED.search(message)]
    return found + DIFFERS.findall(source)


def sources():
    for room in ("backend", os.path.join("capi", "src")):
        for folder, _, names in os.walk(os.path.join(ROOT, room)):
            if not re.search(r"/(test|cts|bench|fake)(/|$)", folder):
                yield from (os.path.join(folder, name) for name in names if name.endswith((".c", ".h", ".cu")))


def test_Messages_OfC_NameTheValuesOfEnums():
    found = {path: bare_numbers(open(path, encoding="utf-8").read()) for path in sources()}
    assert len(found) > 300
    assert bare_numbers('F("layer %d: found restore_input "\n  "%d", id)')
    assert {path: messages for path, messages in found.items() if messages} == {}
