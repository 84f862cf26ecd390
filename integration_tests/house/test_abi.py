"""The ABI of libsluice.so.0 against the committed baseline, layouts included."""

import os
import re
import subprocess

import pytest

PUBLIC = "typedef struct o_s o_t;\nstruct s { int a; %s int b; };\nint f(struct s* s, o_t* o);\n"
PRIVATE = '#include "sluice/comm.h"\nstruct o_s { %s int c; };\nint f(struct s* s, o_t* o) { return s->b + o->c; }\n'


def dump(root, library, out):
    subprocess.run([os.path.join(root, "third_party", "abi", "dump.sh"), library, out], check=True)


def abidiff(before, after):
    done = subprocess.run(["abidiff", before, after], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_Abi_EqualsTheBaseline(libsluice, root, tmp_path):
    baseline = os.path.join(root, "capi", "abi", "baseline.abi")
    assert os.path.exists(baseline), "run third_party/abi/update.sh"
    now = str(tmp_path / "now.abi")
    dump(root, libsluice, now)
    with open(now) as file:
        text = file.read()
    assert "name='sluice_version'" in text and "class-decl name='sluice_moe_config_s' size-in-bits" in text
    assert "pthread" not in text, "the dump holds private types"
    code, report = abidiff(baseline, now)
    kind = "incompatible" if code & 8 else "compatible, but not in the baseline"
    assert code == 0, f"the ABI changed ({kind}); if it was meant to, run third_party/abi/update.sh:\n{report}"


def test_Layout_EveryStructAndConstantOfTheHeaders_IsGolden(root):
    """layout_test asserts what its lists say; here they are complete."""
    with open(os.path.join(root, "capi", "abi", "layout.txt")) as file:
        golden = set(re.findall(r"^(\w+)(?:: \d+ bytes| = )", file.read(), re.M))
    declared = set()
    folder = os.path.join(root, "capi", "include", "sluice")
    for header in os.listdir(folder):
        with open(os.path.join(folder, header)) as file:
            text = re.sub(r"/\*.*?\*/", "", file.read(), flags=re.S)
        declared |= set(re.findall(r"^\}\s*(sluice_\w+_t);", text, re.M))
        for body in re.findall(r"\benum\s*\{(.*?)\}", text, re.S):
            declared |= set(re.findall(r"\bSLUICE_\w+", body))
    assert len(declared) > 100 and declared == golden


@pytest.mark.parametrize(
    ("member", "hidden", "changed"),
    [("", "", False), ("int added;", "", True), ("", "int added;", False)],
    ids=["same", "public_member_added", "private_member_added"],
)
def test_Checker_ChangedLayout_IsFound(root, member, hidden, changed, tmp_path):
    folder = tmp_path / "capi" / "include" / "sluice"
    folder.mkdir(parents=True)
    dumps = []
    for name, public, private in (("before", "", ""), ("after", member, hidden)):
        (folder / "comm.h").write_text(PUBLIC % public)
        (tmp_path / "comm.c").write_text(PRIVATE % private)
        command = ["gcc", "-g", "-O2", "-shared", "-fPIC", "-Icapi/include", "-o", f"{name}.so", "comm.c"]
        subprocess.run(command, check=True, cwd=tmp_path)
        dumps.append(str(tmp_path / f"{name}.abi"))
        dump(root, str(tmp_path / f"{name}.so"), dumps[-1])
    code, report = abidiff(*dumps)
    assert (code != 0) == changed, report
