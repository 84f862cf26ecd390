# SPDX-License-Identifier: Apache-2.0
"""Tests that third_party/test/sanitized.txt has every folder with tests of C, and nothing else."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "third_party" / "test" / "sanitized.txt"


def lines() -> list[tuple[str, str]]:
    words = [line.split() for line in LIST.read_text().splitlines() if line and not line.startswith("#")]
    return [(config, target) for config, target in words]


def folders() -> set[str]:
    """Returns the packages with tests or fuzz targets."""
    command = ["git", "ls-files", "--", "*BUILD"]
    files = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    macro = re.compile(r"^ *sluice_(cc_tests?|fuzz_target)\(", re.MULTILINE)
    return {"//" + str(Path(path).parent) for path in files if macro.search((ROOT / path).read_text())}


def covers(target: str, folder: str) -> bool:
    package, dots, _ = target.partition("/...")
    return folder == package.split(":")[0] or (bool(dots) and folder.startswith(package + "/"))


def test_Folders_WithTestsOfC_RunUnderSanitizersEveryDayOrSayWhyNot() -> None:
    """The list must have every folder: with the smallest suite that covers it, or as one that only --full runs."""
    asked = [(config, target) for config, target in lines() if config in ("asan_ubsan", "full")]
    forgotten = sorted(folder for folder in folders() if not any(covers(target, folder) for _, target in asked))
    assert forgotten == []
    daily = [target for config, target in asked if config == "asan_ubsan"]
    assert [
        folder for config, folder in asked if config == "full" and any(covers(target, folder) for target in daily)
    ] == []


def test_Lines_Each_NameAFolderThatIsThere() -> None:
    there = folders()
    assert {config for config, _ in lines()} == {"asan_ubsan", "tsan", "full"}
    assert [target for _, target in lines() if not any(covers(target, folder) for folder in there)] == []
