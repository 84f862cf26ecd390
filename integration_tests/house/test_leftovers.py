"""What programs and tests put into the folder for temporary files goes with them, also where they fail."""

import os
import re
import subprocess

# A folder or file that only its maker's last line takes away; `TemporaryDirectory` and pytest's `tmp_path` go anyway.
LASTING = {
    ".py": (re.compile(r"\bmkdtemp\(|\bmktemp\(|\bmkstemp\(|delete=False"), re.compile(r"tmp_path_factory\.mktemp\(")),
    ".sh": (re.compile(r"\bmktemp\b"), None),
    ".c": (re.compile(r"\bmkdtemp\(|\bmkstemp\(|\btempnam\("), None),
}
# Those with a word of their own on how it goes.
KNOWN = {
    "backend/base/test/owned_test.c": "tear_down)",
    "backend/base/test/pages_kept_test.c": "tear_down)",
    "backend/calibrate/test/cache_write_test.c": "tear_down)",
    "backend/calibrate/test/cuda_calibrate_test.c": "drop_folder)",
    "backend/cts/comm/mpi_suite_test.sh": "trap 'rm -rf",
    "backend/cts/device/cuda_device_test.c": "drop_sysfs_at_the_end)",
    "backend/gemm/auto/test/gemm_auto_test.c": "rmdir(folder)",
    "capi/test/calibrate/calibrate_test.c": "tear_down)",
    "capi/test/nth/nth_file_call_test.c": "tear_down)",
    "capi/test/nth/nth_state_file_call_test.c": "tear_down)",
    "capi/test/optimizer/optimizer_disk_test.c": "unmount_small)",
    "python_plugin/sluice/decision_log.py": "os.unlink(beside)",
    "third_party/abi/update.sh": "trap 'rm -f",
}


def lasting(path, text):
    pattern, allowed = LASTING[os.path.splitext(path)[1]]
    return pattern.search(allowed.sub("", text) if allowed else text) is not None


def test_TemporaryFolders_OfEveryProgram_GoWhereItFailsToo(root):
    files = subprocess.run(["git", "ls-files"], cwd=root, check=True, capture_output=True, text=True).stdout.split("\n")
    found = set()
    for path in files:
        if os.path.splitext(path)[1] not in LASTING or path == os.path.relpath(__file__, root):
            continue
        with open(os.path.join(root, path)) as file:
            text = file.read()
        if lasting(path, text):
            found.add(path)
            assert KNOWN.get(path, "\0") in text, f"{path} makes a temporary file or folder that stays where it fails"
    assert found == set(KNOWN)  # what is listed is still so


def test_Launchers_OfTests_LogWhereTheTestSays(root):
    """Torch's own launcher makes a folder for logs in /tmp, which stays, unless it is told of another."""
    command = ["git", "grep", "-l", '"torch.distributed.run"', "--", "*.py"]
    done = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    for path in set(done.stdout.split()) - {os.path.relpath(__file__, root)}:
        with open(os.path.join(root, path)) as file:
            assert "--log-dir" in file.read(), path


def test_Lasting_EachWay_IsSeen():
    assert lasting("a.py", "folder = tempfile.mkdtemp()") and lasting("a.sh", "X=$(mktemp -d)")
    assert lasting("a.c", "if (mkdtemp(folder) == NULL)")
    assert not lasting("a.py", 'out = tmp_path_factory.mktemp("c")') and not lasting(
        "a.py", "tempfile.TemporaryDirectory()"
    )
