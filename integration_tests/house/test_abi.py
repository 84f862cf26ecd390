# SPDX-License-Identifier: Apache-2.0
"""Tests that the record of the C ABI, capi/abi/abi.txt, is complete, matches the headers, and detects changes."""

import os
import re
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[:0] = [os.path.join(ROOT, "capi", folder) for folder in ("packaging", "bindings")]
import abi_since  # noqa: E402
import declarations  # noqa: E402
import generate  # noqa: E402
import libraries  # noqa: E402
import record  # noqa: E402

LAYOUT = os.path.join(ROOT, "capi", "test", "layout")
EARLIER = """\
# of a release
sluice_a_t: 16 bytes
  0 +8 struct_size: size_t; 8 +4 left: int32_t
  12 +4 reserved: int32_t
sluice_b_t: 8 bytes
  0 +8 data: const void*
SLUICE_A = 1
typedef void (*sluice_call_fn_t)(void* user);
void sluice_trial(int32_t x);
int32_t sluice_a_create(const sluice_a_t* config, sluice_x_t** out_x);
experimental sluice_trial
"""
CREATE = EARLIER.splitlines()[-2]


@pytest.fixture(scope="module")
def recorded():
    with open(os.path.join(ROOT, record.PATH)) as file:
        return file.read()


def test_Record_IsThatOfTheHeaders():
    command = [sys.executable, os.path.join(ROOT, "capi", "bindings", "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_Record_StaleFile_SaysWhatDiffersAndWhatToRun(recorded, tmp_path):
    path = tmp_path / "abi.txt"
    path.write_text(recorded)
    generate.check(path, recorded)
    path.write_text(recorded.replace("SLUICE_OK = 0", "SLUICE_OK = 1"))
    with pytest.raises(SystemExit, match=r"-SLUICE_OK = 1\n\+SLUICE_OK = 0\ngenerate: run "):
        generate.check(path, recorded)


def test_Record_EveryStructConstantAndFunctionOfTheHeaders_IsInIt(recorded):
    """The compiler checks the existing lines; this test finds missing ones, with another parser of the headers."""
    found = set(re.findall(r"(?:^|; )(\w+)(?:: \d+ bytes| = )", recorded, re.M))
    declared, functions = set(), set()
    folder = os.path.join(ROOT, "capi", "include", "sluice")
    for header in os.listdir(folder):
        with open(os.path.join(folder, header)) as file:
            text = re.sub(r"/\*.*?\*/", "", file.read(), flags=re.S)
        declared |= set(re.findall(r"^\}\s*(sluice_\w+_t);", text, re.M))
        for body in re.findall(r"\benum\s*\{(.*?)\}", text, re.S):
            declared |= set(re.findall(r"\bSLUICE_\w+", body))
        functions |= set(re.findall(r"^SLUICE_(?:API|EXPORT)\b[^;(]*?\b(sluice_\w+)\(", text, re.M))
    assert len(declared) > 100 and declared == found
    assert functions == record.functions(recorded) > {"sluice_version"}


def test_Experimental_Marks_AreThoseOfThePage(recorded):
    """The headers mark the same functions as the page lists."""
    with open(os.path.join(ROOT, "capi", "abi", "ABI.md")) as file:
        section = file.read().split("## What is experimental", 1)[1].split("\n## ", 1)[0]
    wanted = set()
    for headers, functions in re.findall(r"^\| (`.*?) \| (all|`.*?) \|", section, re.M):
        for header in re.findall(r"`(\w+\.h)`", headers):
            with open(os.path.join(ROOT, "capi", "include", "sluice", header)) as file:
                declared = set(re.findall(r"^SLUICE_(?:API|EXPORT)\b[^;(]*?\b(sluice_\w+)\(", file.read(), re.M))
            named = declared if functions == "all" else set(re.findall(r"`(\w+)`", functions))
            assert named and named <= declared, header
            wanted |= named
    marked = declarations.experimental(os.path.join(ROOT, "capi", "include"))
    assert (
        marked == wanted
        and {name for name in record.functions(recorded) if "nccl" in name or "migration" in name} <= marked
    )
    listed = record.experimental_names(recorded)
    assert {"sluice_migration_config_t", "sluice_planner_problem_t", "sluice_nccl_group_t"} < listed - marked
    assert not {"sluice_comm_config_t", "sluice_tensor_t", "sluice_context_config_t"} & listed


@pytest.mark.parametrize(("call", "warns"), [("sluice_migration_abort(0, 0)", True), ("sluice_comm_abort(0)", False)])
def test_Experimental_MacroOfTheProgram_WarnsOfItsUse(call, warns):
    text = '#define SLUICE_EXPERIMENTAL __attribute__((deprecated))\n#include "sluice/sluice.h"\n'
    text += f"void f(void) {{ {call}; }}\n"
    command = [
        "gcc",
        "-std=c99",
        "-Werror",
        "-fsyntax-only",
        "-I",
        os.path.join(ROOT, "capi", "include"),
        "-x",
        "c",
        "-",
    ]
    done = subprocess.run(command, input=text, text=True, capture_output=True)
    assert (done.returncode != 0) == warns == ("deprecated" in done.stderr), done.stderr


def compiles(text, folder):
    """Returns whether layout_test.c accepts a record of that text."""
    (folder / "abi.txt").write_text(text)
    listed = subprocess.run(
        ["awk", "-f", os.path.join(LAYOUT, "abi.awk"), folder / "abi.txt"], check=True, capture_output=True, text=True
    )
    inc = folder / "capi" / "test" / "layout" / "abi.inc"
    inc.parent.mkdir(parents=True, exist_ok=True)
    inc.write_text(listed.stdout)
    command = [
        "gcc",
        "-std=c11",
        "-fsyntax-only",
        "-I",
        folder,
        "-I",
        ROOT,
        "-I",
        os.path.join(ROOT, "capi", "include"),
    ]
    done = subprocess.run([*command, os.path.join(LAYOUT, "layout_test.c")], capture_output=True, text=True)
    return done.returncode == 0


@pytest.mark.parametrize(
    ("line", "damaged"),
    [
        ("", ""),
        ("sluice_comm_config_t: 40 bytes", "sluice_comm_config_t: 48 bytes"),
        (" 16 +4 rank: int32_t", " 20 +4 rank: int32_t"),
        (" 16 +4 rank: int32_t", " 16 +8 rank: int32_t"),
        (" 16 +4 rank: int32_t", " 16 +4 rank: uint32_t"),
        ("SLUICE_OK = 0", "SLUICE_OK = 1"),
        ("typedef void (*sluice_log_fn_t)(void* user,", "typedef void (*sluice_log_fn_t)(const void* user,"),
        ("int32_t sluice_comm_rank(const", "int64_t sluice_comm_rank(const"),
        ("int32_t sluice_comm_rank(const ", "int32_t sluice_comm_rank("),
        ("SLUICE_OK = 0", "SLUICE_OK is 0"),
    ],
    ids=["same", "size", "offset", "width", "member", "constant", "callback", "result", "parameter", "unknown_line"],
)
def test_Compiler_LineThatIsNotTheHeaders_IsRefused(recorded, line, damaged, tmp_path):
    assert line in recorded
    assert compiles(recorded.replace(line, damaged, 1), tmp_path) == (not line)


@pytest.mark.parametrize(
    ("line", "later", "broken"),
    [
        ("", "", []),
        ("SLUICE_A = 1\n", "SLUICE_A = 1; SLUICE_A_B = 2\nSLUICE_B = 2\n", []),
        ("sluice_a_t: 16 bytes", "sluice_a_t: 24 bytes", []),
        ("  12 +4 reserved: int32_t", "  12 +4 right: int32_t", []),
        ("sluice_a_t: 16 bytes", "sluice_a_t: 8 bytes", ["sluice_a_t: 16 bytes"]),
        ("sluice_b_t: 8 bytes", "sluice_b_t: 16 bytes", ["sluice_b_t: 8 bytes"]),
        ("; 8 +4 left: int32_t", "; 8 +4 left: uint32_t", ["sluice_a_t: 8 +4 left: int32_t"]),
        ("SLUICE_A = 1", "SLUICE_A = 2", ["SLUICE_A = 1"]),
        ("(void* user)", "(void* user, int32_t more)", ["typedef void (*sluice_call_fn_t)(void* user);"]),
        ("int32_t sluice_a_create", "void sluice_a_create", [CREATE]),
        (CREATE + "\n", "", [CREATE]),
        ("void sluice_trial(int32_t x);\nint32_t", "int32_t", []),
    ],
    ids=[
        *("same", "new_constant", "grown", "reserved_used", "shrunk", "fixed_struct", "member", "value", "callback"),
        *("signature", "removed", "experimental"),
    ],
)
def test_Release_LaterRecord_BreaksWhatIsGone(line, later, broken):
    assert line in EARLIER
    assert [
        re.sub(r"^(\w+: )\1", r"\1", one) for one in record.breaks(EARLIER, EARLIER.replace(line, later, 1))
    ] == broken


def repository(folder, monkeypatch):
    """Makes a Git repository that replaces this one, and returns its `git`."""

    def git(*arguments):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=b", *arguments], cwd=folder, check=True)

    git("init", "-q")
    monkeypatch.setattr(abi_since, "ROOT", str(folder))
    monkeypatch.setattr(generate, "ROOT", str(folder))
    return git


@pytest.mark.parametrize(
    ("line", "earlier", "says"),
    [
        ("", "", None),
        ("SLUICE_OK", "SLUICE_GONE = 1\nSLUICE_OK", "SLUICE_GONE = 1"),
        (
            "int32_t sluice_comm_rank(",
            "# int32_t sluice_comm_rank(",
            "sluice_comm_rank: list this new function in capi/abi/sluice.lds",
        ),
    ],
    ids=["kept", "broken", "without a node"],
)
def test_Release_HeadersThatBreakTheNewestTag_AreRefused(recorded, line, earlier, says, monkeypatch, tmp_path):
    git = repository(tmp_path, monkeypatch)
    abi_since.check_abi(libraries.version())  # no release yet
    path = tmp_path / record.PATH
    path.parent.mkdir(parents=True)
    path.write_text(recorded.replace(line, earlier, 1))
    git("add", ".")
    git("commit", "-q", "-m", "x")
    git("tag", f"v{libraries.version()}")
    if says:
        with pytest.raises(libraries.Failure, match=rf"the ABI of v[\d.]+ is broken.*\n{says}$"):
            abi_since.check_abi(libraries.version())
    else:
        abi_since.check_abi(libraries.version())


@pytest.mark.parametrize(
    ("version", "tag"), [("0.1.2", "v0.1.1"), ("0.2.0", None), ("1.3.0", "v1.2.0"), ("2.0.0", None)]
)
def test_Release_ComparedWith_IsTheNewestThatItKeeps(version, tag, monkeypatch, tmp_path):
    git = repository(tmp_path, monkeypatch)
    git("commit", "-q", "--allow-empty", "-m", "x")
    for name in ("v0.1.0", "v0.1.1", "v1.0.0", "v1.2.0", "w1.9.0"):
        git("tag", name)
    assert abi_since.newest(version) == tag
