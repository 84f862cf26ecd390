"""The pages docs/add-a-*.md: their lists of files are those that the parts which are there needed."""

import ast
import os
import re
import subprocess

import pytest
from test_documents import ROOT, text

# Page: what stands for `yours` in it, among the parts that are there. Files that name the first are looked for.
EXAMPLES = {
    "add-a-communicator.md": ("tcp",),
    "add-a-device.md": ("cpu",),
    "add-a-host.md": ("megatron", "deepspeed", "transformers"),
}
# Files that name a part without having to know it: who calls it, tests of it, and parts beside it.
CALLERS = {
    "add-a-communicator.md": re.compile(
        r"adapters/|backend/comm/|backend/\w+/test/|backend/cts/comm/messages_bench|capi/bindings/|capi/include/sluice/sluice.hpp|capi/test/[\w/]+\.c|docs/(?!c-abi|architecture)|"
        r"(integration_tests/house|contrib/soak)/"
    ),
    "add-a-device.md": re.compile(
        r"backend/device/\w+/|backend/\w+/test/|backend/cts/device/fake_device|docs/|integration_tests/house/|capi/test/[\w/]+_test\.c|"
        r"\.bazelrc|third_party/test/"
    ),
    # The package is compared by what its code says, below. The backend has policies that papers name after Megatron.
    "add-a-host.md": re.compile(
        r"adapters/megatron/|python_plugin/|backend/|integration_tests/(benchmarks|deepspeed|megatron|gpu|house)/|"
        r"docs/(add-a-host|benchmarks/|placement)"
    ),
}
NAMED = {
    "add-a-communicator.md": r"comm/tcp\b|sluice_comm_create_tcp|sluice_tcp_config",
    "add-a-device.md": r"device/cpu\b|sluice_cpu_device",
    "add-a-host.md": r"[Mm]egatron",
}


def listed(page):
    """The files in the table of the page's section "Files", first column."""
    section = page.split("\n## Files\n", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    return {path for row in rows for path in re.findall(r"`([^`]+)`", row)}


def files_that_name(pattern):
    command = ["git", "grep", "-l", "-E", pattern]
    return set(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split())


def missing(page, named, callers, example):
    """Files that the page should list, since they name the example."""
    known = {path.replace("yours", example) for path in listed(page)}
    return sorted(path for path in named - known if not callers.match(path))


@pytest.mark.parametrize("name", EXAMPLES)
def test_Files_ExistForEveryPartThatIsThere(name):
    paths = listed(text("docs", name))
    assert len(paths) > 10
    for example in EXAMPLES[name]:
        absent = [path for path in paths if not os.path.exists(os.path.join(ROOT, path.replace("yours", example)))]
        assert absent == [], example


@pytest.mark.parametrize("name", NAMED)
def test_FilesThatNameAPart_AreListed(name):
    named = files_that_name(NAMED[name])
    assert len(named) > 5
    assert missing(text("docs", name), named, CALLERS[name], EXAMPLES[name][0]) == []


def test_FileThatIsLeftOut_IsFound():
    page = "\n## Files\n\n| file |\n|---|\n| `capi/BUILD` |\n| `backend/comm/yours/BUILD` |\n"
    named = {"capi/BUILD", "backend/comm/tcp/BUILD", "capi/abi/since.txt", "adapters/torch/transport.py"}
    assert missing(page, named, CALLERS["add-a-communicator.md"], "tcp") == ["capi/abi/since.txt"]


def hosts_in(source):
    """Hosts that the code names: in identifiers and strings, comments and docstrings left out."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and _says(node)}
    words = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            words.append(node.value)
        words += [getattr(node, field, None) or "" for field in ("id", "attr", "module")]
        words.append(node.name if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else "")
    return {host for host in EXAMPLES["add-a-host.md"] if any(host in word for word in words)}


def _says(node):
    return bool(node.body) and isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)


def test_PackageFilesThatKnowAHost_AreListed():
    package = "python_plugin/sluice"
    files = subprocess.run(["git", "ls-files", package], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    sources = [path for path in files.split() if path.endswith(".py") and "/test/" not in path]
    knowing = {path for path in sources if hosts_in(text(path))}
    assert knowing == {path for path in listed(text("docs", "add-a-host.md")) if path.startswith(package)}


def test_Hosts_AreFoundInCodeAlone():
    assert hosts_in('"""deepspeed"""\n# transformers\nimport sys\n') == set()
    assert hosts_in("from transformers import x\n") == {"transformers"}
    assert hosts_in('NAME = "deepspeed.runtime"\n') == {"deepspeed"}
