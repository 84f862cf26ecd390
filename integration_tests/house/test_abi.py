"""The ABI of libsluice.so.0 against the committed baseline, layouts included."""

import os
import subprocess

import pytest

STRUCT = "struct s { int a; %s int b; };\nint f(struct s* s) { return s->b; }\n"


def abidw(library, out, include_dir=None):
    headers = ["--headers-dir", include_dir] if include_dir else []
    command = ["abidw", *headers, "--no-corpus-path", "--no-comp-dir-path", "--no-show-locs", "--type-id-style", "hash"]
    subprocess.run([*command, "--out-file", out, library], check=True)


def abidiff(before, after):
    done = subprocess.run(["abidiff", before, after], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_Abi_EqualsTheBaseline(libsluice, root, include_dir, tmp_path):
    baseline = os.path.join(root, "capi", "abi", "baseline.abi")
    assert os.path.exists(baseline), "run third_party/abi/update.sh"
    now = str(tmp_path / "now.abi")
    abidw(libsluice, now, os.path.join(include_dir, "sluice"))
    with open(now) as file:
        assert "sluice_version" in file.read()
    code, report = abidiff(baseline, now)
    kind = "incompatible" if code & 8 else "compatible, but not in the baseline"
    assert code == 0, f"the ABI changed ({kind}); if it was meant to, run third_party/abi/update.sh:\n{report}"


@pytest.mark.parametrize(("member", "changed"), [("", False), ("int added;", True)], ids=["same", "member_added"])
def test_Checker_ChangedLayout_IsFound(member, changed, tmp_path):
    dumps = []
    for name, text in (("before", STRUCT % ""), ("after", STRUCT % member)):
        source, library, dump = tmp_path / f"{name}.c", tmp_path / "lib.so", tmp_path / f"{name}.abi"
        source.write_text(text)
        subprocess.run(["gcc", "-g", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
        abidw(str(library), str(dump))
        dumps.append(str(dump))
    code, _ = abidiff(*dumps)
    assert (code != 0) == changed
