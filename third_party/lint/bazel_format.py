# SPDX-License-Identifier: Apache-2.0
"""Formats and checks BUILD, WORKSPACE and .bzl files.

buildifier is neither a Debian nor a PyPI package. Its style is that of Python's formatters except for spaces around the
`=` of an argument, and sorted lists. So the pinned ruff formats, and this script applies those two rules.

    bazel_format.py [--fix] FILE...
"""

import argparse
import ast
import io
import os
import subprocess
import sys
import tokenize

SORTED = {"srcs", "hdrs", "deps", "data", "tags", "visibility", "textual_hdrs"}


def ruff(text):
    command = [os.path.join(os.path.dirname(sys.executable), "ruff"), "format", "--isolated", "--preview"]
    # A list or a call that fits on one line stays there, with or without a comma at its end.
    command += ["--line-length", "120", "--config", "format.skip-magic-trailing-comma=true"]
    command += ["--stdin-filename", "BUILD.py", "-"]
    done = subprocess.run(command, input=text, text=True, capture_output=True)
    if done.returncode != 0:
        raise SyntaxError(done.stderr.strip())
    return done.stdout


def space_arguments(text):
    """Changes `f(name="x")` to `f(name = "x")`, as buildifier writes it."""
    lines = text.splitlines(keepends=True)
    depth, edits = 0, []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.OP:
            continue
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(token.string, 0)
        if token.string == "=" and depth > 0:
            edits.append(token.start)
    for row, column in reversed(edits):
        line = lines[row - 1]
        lines[row - 1] = f"{line[:column].rstrip()} = {line[column + 1 :].lstrip()}"
    return "".join(lines)


def sort_key(label):
    """Returns the key of buildifier's order: plain files, then :local, //absolute and @external labels."""
    group = 3 if label.startswith("@") else 2 if label.startswith("//") else 1 if label.startswith(":") else 0
    return group, label.replace(":", "!")


def unsorted_lists(text):
    """Yields each unsorted list of labels, unless its first line has `# keep order`."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.keyword) or node.arg not in SORTED or not isinstance(node.value, ast.List):
            continue
        items = [item.value for item in node.value.elts if isinstance(item, ast.Constant)]
        if len(items) != len(node.value.elts) or "# keep order" in lines[node.value.lineno - 1]:
            continue
        if items != sorted(items, key=sort_key):
            yield node.value, items


def sort_lists(text):
    """Sorts lists of labels that have one label per line and no comments."""
    lines = text.splitlines(keepends=True)
    for node, _items in unsorted_lists(text):
        rows = [item.lineno - 1 for item in node.elts]
        if rows != list(range(node.lineno, node.end_lineno - 1)) or any("#" in lines[row] for row in rows):
            continue
        values = sorted((item.value for item in node.elts), key=sort_key)
        indent = lines[rows[0]][: len(lines[rows[0]]) - len(lines[rows[0]].lstrip())]
        for row, value in zip(rows, values):
            lines[row] = f'{indent}"{value}",\n'
    return "".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fix", action="store_true", help="rewrite the files")
    parser.add_argument("files", nargs="+")
    options = parser.parse_args()
    bad = 0
    for path in options.files:
        with open(path) as file:
            text = file.read()
        try:
            wanted = space_arguments(ruff(text))
            wanted = sort_lists(wanted)
        except SyntaxError as error:
            print(f"{path}: {error}")
            bad += 1
            continue
        if options.fix and wanted != text:
            with open(path, "w") as file:
                file.write(wanted)
        elif wanted != text:
            print(f"{path}: not formatted; third_party/lint/lint.sh --fix rewrites it")
            bad += 1
        for node, _items in unsorted_lists(wanted):
            print(f"{path}:{node.lineno}: list out of order (plain, :local, //absolute)")
            bad += 1
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
