"""What stands once: the one hash, and macros of checks that do not return from the function that uses them."""

import os
import re
import subprocess

import pytest

# FNV-1a's numbers, however they are written. The digest stands outside of the library and may use none of it.
FNV = re.compile(r"cbf29ce484222325|100000001b3|14695981039346656037|1099511628211", re.IGNORECASE)
HASHING = re.compile(
    r"backend/base/(hash\.h|test/hash_test\.c)|integration_tests/(digest/data\.[ch]|house/test_repeats\.py)"
)
RETURNS = re.compile(r"\bdo \{.*\breturn\b", re.DOTALL)
MACRO = re.compile(r"^#define (\w+)\(.*?(?<!\\)\n", re.MULTILINE | re.DOTALL)


def hidden_returns(text):
    """Macros that return from the function that they stand in, and are not called TRY for it."""
    return [macro[1] for macro in MACRO.finditer(text) if RETURNS.search(macro[0]) and "TRY" not in macro[1].split("_")]


def _sources(root, *patterns):
    found = subprocess.run(["git", "ls-files", *patterns], cwd=root, check=True, capture_output=True, text=True)
    for path in found.stdout.split():
        with open(os.path.join(root, path), errors="replace") as file:
            yield path, file.read()


def test_Hash_StandsOnce(root):
    found = [path for path, text in _sources(root, "*.c", "*.h", "*.cpp", "*.cu", "*.py") if FNV.search(text)]
    assert "backend/base/hash.h" in found
    assert [path for path in found if not HASHING.fullmatch(path)] == [], "use backend/base/hash.h"


def test_Macros_DoNotReturnUnlessTheirNameSaysSo(root):
    found = {path: hidden_returns(text) for path, text in _sources(root, "*.c", "*.h", "*.cpp", "*.inc")}
    assert any(path == "backend/base/check.h" for path in found)
    assert {path: names for path, names in found.items() if names} == {}, "call them ..._TRY, or let them not return"


@pytest.mark.parametrize(
    "text,names",
    [
        ("#define CHECK(x) \\\n  do { \\\n    if (!(x)) return; \\\n  } while (0)\n", ["CHECK"]),
        ("#define SLUICE_TRY(x) do { if (x) return 1; } while (0)\n", []),
        ("#define TWICE(x) \\\n  ((x) + (x))\nint f(void) { return 1; }\n", []),
    ],
    ids=["hidden", "named", "behind_it"],
)
def test_HiddenReturn_IsFound(text, names):
    assert hidden_returns(text) == names
