#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts the tracked lines of the repository by area, and the share of them that is the product.

  third_party/size/measure.py [COMMIT]    this tree, or a commit; areas.txt next to this file defines the areas
  third_party/size/measure.py --check     also ends with 1 if the tree has more than MOST_LINES, or the product less
                                          than LEAST_SHARE of them

A file that no line of areas.txt takes is an error, so that the areas always add up to the whole tree.
"""

import argparse
import fnmatch
import io
import pathlib
import subprocess
import sys
import tarfile

HERE = pathlib.Path(__file__).resolve().parent
MOST_LINES, LEAST_SHARE = 226_000, 0.43
PRODUCT = "product"


def rules(text):
    """Returns (area, patterns) of each line."""
    words = (line.split() for line in text.splitlines() if line.strip() and not line.startswith("#"))
    return [(area, patterns) for area, *patterns in words]


def area_of(path, known):
    """Returns the area of the first line that matches this path, or None."""
    for area, patterns in known:
        for pattern in patterns:
            if path.startswith(pattern) if pattern.endswith("/") else fnmatch.fnmatchcase(path, pattern):
                return area
    return None


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=HERE, check=True, capture_output=True).stdout


def files(commit):
    """Yields (path, content) of each tracked file in the tree or in a commit."""
    root = pathlib.Path(git("rev-parse", "--show-toplevel").decode().strip())
    if commit is None:
        for path in git("ls-files", "-z", "--full-name", ":/").decode().split("\0"):
            if path and (root / path).is_file():
                yield path, (root / path).read_bytes()
        return
    with tarfile.open(fileobj=io.BytesIO(git("-C", root, "archive", commit))) as archive:
        for entry in archive:
            if entry.isfile():
                yield entry.name, archive.extractfile(entry).read()


def measure(contents, known):
    """Returns lines and files by area, and the paths without an area."""
    lines, counts, unknown = {}, {}, []
    for path, content in contents:
        area = area_of(path, known)
        if area is None:
            unknown.append(path)
            continue
        lines[area] = lines.get(area, 0) + content.count(b"\n")
        counts[area] = counts.get(area, 0) + 1
    return lines, counts, unknown


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    lines, counts, unknown = measure(files(options.commit), rules((HERE / "areas.txt").read_text()))
    if unknown:
        print("areas.txt has no area for:", *unknown, sep="\n  ", file=sys.stderr)
        return 2
    total = sum(lines.values())
    product = sum(count for area, count in lines.items() if area.startswith(PRODUCT))
    for area in sorted(lines, key=lambda area: -lines[area]):
        print(f"{area:<18} {lines[area]:>8,} lines {counts[area]:>6,} files {100 * lines[area] / total:5.1f} %")
    print(f"tracked lines      {total:>8,}  (at most {MOST_LINES:,})")
    print(f"product            {product:>8,}  {100 * product / total:.1f} % (at least {100 * LEAST_SHARE:.0f} %)")
    return int(options.check and (total > MOST_LINES or product < LEAST_SHARE * total))


if __name__ == "__main__":
    sys.exit(main())
