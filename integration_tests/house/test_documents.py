# SPDX-License-Identifier: Apache-2.0
"""Tests that the pages for users name everything that users can call, set and write, and that their links are valid."""

import ast
import importlib.util
import os
import re
import subprocess

import pytest
from test_symbols import functions

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def pages():
    """Returns the pages for users and contributors: in the root folder, and all below docs/."""
    below = []
    for folder, _, names in os.walk(os.path.join(ROOT, "docs")):
        below += [os.path.relpath(os.path.join(folder, name), ROOT) for name in names if name.endswith(".md")]
    return ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *sorted(below)]


PAGES = pages()
# Variables that the library or the package reads in users' runs; tests, benchmarks and set-up have other ones.
SHIPPED = ("adapters", "backend", "capi/src", "python_plugin/sluice")
READS = re.compile(
    r"""(?:getenv|read_environment)\("(SLUICE\w*)"[,)]|"""
    r"""environ(?:\.get\(|\[)\s*"(SLUICE\w*)"|^[A-Z]+ = "(SLUICE(?:_[A-Z_]+)?)"$""",
    re.MULTILINE,
)


def text(*path):
    with open(os.path.join(ROOT, *path)) as file:
        return file.read()


def shipped_files():
    for top in SHIPPED:
        for folder, folders, names in os.walk(os.path.join(ROOT, top)):
            folders[:] = [name for name in folders if name not in ("test", "fake", "__pycache__")]
            for name in names:
                if name.endswith((".c", ".h", ".cpp", ".py")) and not name.endswith("_test.c"):
                    yield os.path.join(folder, name)


def variables_read():
    found = set()
    for path in shipped_files():
        for groups in READS.findall(text(path)):
            found |= {name for name in groups if name}
    return found


def literal(module, name):
    """Returns the value of a module-level constant without importing the module."""
    for node in ast.parse(text("python_plugin", "sluice", module)).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return node.value
    raise AssertionError(f"{module} has no {name}")


def test_Manual_EveryExportedFunction_StandsInTheIndexOfItsHeader():
    index = text("docs", "c-abi.md").split("## Every function", 1)[1]
    rows = dict(re.findall(r"\| `(\w+\.h)` \| (.*) \|", index))
    folder = os.path.join(ROOT, "capi", "include", "sluice")
    for header in sorted(name for name in os.listdir(folder) if name.endswith(".h")):
        declared = {name for name, _, _ in contracts(text("capi", "include", "sluice", header))}
        assert declared == set(re.findall(r"`(sluice_\w+)`", rows.get(header, ""))), header


DECLARED = re.compile(r"/\*.*?\*/|^SLUICE_(?:API|EXPORT)\b[^;]*;", re.S | re.M)
THREADS = re.compile(
    r"thread-safe|immutable|any thread|(?:context|comm)-exclusive|setup-only|threads(?:, errors)?: ", re.IGNORECASE
)
ERRORS = re.compile(r"\berrors\b", re.IGNORECASE)


def contracts(header):
    """Yields (function, whether it returns a status, the comment before it or its group) of a header's text."""
    comment = ""
    for found in DECLARED.findall(header):
        if found.startswith("/*"):
            comment = " ".join(line.strip(" */") for line in found.splitlines())
        else:
            yield re.search(r"\b(sluice_\w+)\(", found).group(1), found.startswith("SLUICE_API"), comment


def unsaid(header):
    """Yields the properties of functions that the header does not document. base.h documents them for all functions
    named _init and _destroy."""
    for name, has_status, comment in contracts(header):
        if not name.endswith(("_init", "_destroy")):
            if not THREADS.search(comment):
                yield f"{name}: threads"
            if has_status and not ERRORS.search(comment):
                yield f"{name}: errors"


def test_Headers_EveryFunction_SaysItsThreadsAndErrors():
    folder = os.path.join(ROOT, "capi", "include", "sluice")
    texts = {header: text("capi", "include", "sluice", header) for header in sorted(os.listdir(folder))}
    assert {name for header in texts.values() for name, _, _ in contracts(header)} == functions()
    assert {header: found for header, body in texts.items() if (found := list(unsaid(body)))} == {}


def test_Manual_EverySavedBuffer_IsDescribed():
    section = text("docs", "c-abi.md").split("## Saved buffers", 1)[1].split("\n## ", 1)[0]
    buffers = set(re.findall(r"\bSLUICE_SAVED_(\w+) = ", text("capi", "include", "sluice", "moe.h"))) - {"COUNT"}
    assert len(buffers) == 5 and buffers <= set(re.findall(r"`(\w+)`", section))


def test_Variables_EveryOneThatIsRead_IsDocumentedAndNoOther():
    page = text("docs", "environment.md")
    documented = set(re.findall(r"`(SLUICE\w*)`", page.split("Others that matter")[0]))
    read = variables_read()
    assert {"SLUICE", "SLUICE_OPTIONS", "SLUICE_GEMM"} <= read, "the search finds nothing any more"
    assert documented == read


def test_Tuning_EveryReasonOfADecision_IsExplained():
    rooms = os.walk(os.path.join(ROOT, "backend", "tune"))
    files = [os.path.join(room, name) for room, _, names in rooms for name in sorted(names) if name.endswith(".c")]
    bodies = [body for file in files for body in text(file).split("sluice_tuner_why_name(int32_t")[1:]]
    reasons = set(re.findall(r'"([^"]+)"', bodies[0].split("};")[0]))
    table = text("docs", "tuning.md").split("| `why` | meaning |")[1].split("\n\n")[0]
    explained = {word for line in table.splitlines()[2:] for word in re.findall(r"`([^`]+)`", line.split("|")[1])}
    # A layer's choices before a decision, which no decision reports.
    assert len(bodies) == 1 and explained == reasons - {"nothing timed yet", "on trial"}


def _slugs(page):
    """Returns the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text(page), flags=re.S), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page, words):
    """Returns relative links in the text of a page that lead to no file, or to no heading of a page."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", words, flags=re.S)):
        path, _, anchor = target.partition("#")
        path = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
        if "://" in target:
            continue
        if not os.path.exists(os.path.join(ROOT, path)) or (anchor and anchor not in _slugs(path)):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_Links_OfEveryPage_LeadSomewhere(page):
    assert dead_links(page, text(page)) == []


# Possible parents of a path, which pages leave out.
BASES = ("", "backend", "capi/include", "adapters", "integration_tests", "docs")


def absent_paths(words):
    """Returns paths in backticks that do not exist, although their first folder does: `moe/routing`, ..."""
    found = []
    for path in re.findall(r"`(?:\./)?([\w-][\w.-]*/[\w./-]*)`", words):
        homes = [base for base in BASES if os.path.isdir(os.path.join(ROOT, base, path.split("/")[0]))]
        if homes and "yours" not in path and not any(os.path.exists(os.path.join(ROOT, home, path)) for home in homes):
            found.append(path)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_Paths_InBackticks_Exist(page):
    assert absent_paths(text(page)) == []


def long_lines(words):
    """Returns lines of more than 100 columns. Rows of tables may be longer, as they are one line each.

    Only the text of a link counts.
    """
    lines = [re.sub(r"\]\([^)]*\)", "]", line) for line in words.split("\n")]
    return [line for line in lines if len(line) > 100 and not line.startswith("|")]


def written_pages():
    """Returns every page of the repository, including those next to the code."""
    done = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.split()


@pytest.mark.parametrize("page", written_pages())
def test_Lines_OfEveryPage_HaveAtMost100Columns(page):
    assert long_lines(text(page)) == []


def test_Glossary_HasEveryTensorAndPolicy():
    terms = {
        term for row in re.findall(r"^\| ([^|]+) \|", text("docs", "glossary.md"), re.M) for term in row.split(", ")
    }
    tensors = set(
        re.findall(r'^    \[SLUICE_T_\w+\] = \{"([^"]+)"', text("backend", "schedule", "tensor_table.c"), re.M)
    )
    restore = text("backend", "model", "restore.c")
    policies = set(re.findall(r'\.word = "([^"]+)", \.tensors', restore))
    sets = set(re.findall(r'^    \{"(\w+)", SLUICE_RESTORE', restore, re.MULTILINE))
    assert len(tensors) > 15 and len(policies) >= 4 and len(sets) >= 5
    assert tensors | policies | sets <= terms


def test_Evidence_EveryFileAndTargetThatItNames_IsThere():
    page = text("docs", "evidence.md")
    files = set(re.findall(r"(?:[\w.-]+/)+[\w.-]+\.(?:py|sh)", page))
    assert len(files) > 10 and [path for path in files if not os.path.exists(os.path.join(ROOT, path))] == []
    targets = set(re.findall(r"//([\w/]+):(\w+)", page))
    assert len(targets) > 5
    assert [f"//{folder}:{name}" for folder, name in targets if f'"{name}"' not in text(folder, "BUILD")] == []


NAMED = re.compile(r"(?<![\w*{])[\w-]+\.md\b")
MADE_BY_TESTS = {"README.md", "yours.md"}  # files of other trees that tests write or read, and a name in recipes


def unknown_documents(words, documents):
    return sorted({name for name in NAMED.findall(words) if name not in documents | MADE_BY_TESTS})


def test_Documents_ThatSourcesName_AreInTheRepository():
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    documents = {os.path.basename(path) for path in files if path.endswith(".md")}
    missing = {
        path: unknown
        for path in files
        if path.endswith((".c", ".h", ".cc", ".cpp", ".cu", ".py", ".md", ".sh", "BUILD"))
        and path != os.path.relpath(__file__, ROOT)
        and (unknown := unknown_documents(text(path), documents))
    }
    assert missing == {}


def test_Checkers_FindAFaultOfEachKind():
    header = "/* Thread-safe. */\nSLUICE_API sluice_status_t sluice_a(int x);\n/* Errors: ABI. */\n"
    header += "SLUICE_API sluice_status_t\nsluice_b(void);\n/* Any\n * thread. */\nSLUICE_EXPORT void sluice_c(void);\n"
    assert list(unsaid(header)) == ["sluice_a: errors", "sluice_b: threads"]
    links = "[a](style.md) [b](gone.md) [c](style.md#gone) [d](style.md#style) [e](#gone) [f](https://x.org/gone)"
    assert dead_links("docs/style.md", links) == ["gone.md", "style.md#gone", "#gone"]
    assert absent_paths("`moe/routing` `moe/gone.c` `sluice/moe.h` `tc/tbf`") == ["moe/gone.c"]
    assert long_lines("\n".join(["x" * 101, "x" * 100, "| " + "x" * 100])) == ["x" * 101]
    assert unknown_documents("/* see contracts.md, and docs/tools.md */", {"tools.md"}) == ["contracts.md"]


def test_Pictures_AreThoseThatTodaysToolsDraw():
    spec = importlib.util.spec_from_file_location("draw", os.path.join(ROOT, "docs", "pictures", "draw.py"))
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    kept = {name for name in os.listdir(os.path.join(ROOT, "docs", "pictures")) if name.endswith(".svg")}
    assert set(draw.PICTURES) == kept
    for name, picture in draw.drawn().items():
        same = picture == text("docs", "pictures", name)  # a diff of two pictures is not readable
        assert same, f"{name} is not what today's tools draw: run docs/pictures/draw.py, and look at it"
