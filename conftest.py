# SPDX-License-Identifier: Apache-2.0
"""Configures all Python tests: the environment that the checkout's .venv needs, and the markers.

Long tests have the marker `full`, or are named in third_party/test/long.txt; covered.txt next to it names the daily
checks that replace them. Tests that measure time have the marker `alone`: ./test runs them one by one, after all other
tests, which several processes (pytest-xdist) share by file.
"""

import os
import signal
import sys

import pytest

ROOT = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.join(ROOT, "third_party", "test"))
import covered  # noqa: E402

# The settings of third_party/setup/env.sh, for a pytest that is started by hand.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ["OMP_NUM_THREADS"] = "1"  # more threads spend most of their time waiting for each other: models are tiny
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.join(ROOT, ".venv", "torch_extensions"))
os.environ.setdefault("SLUICE_CACHE_DIR", os.path.join(ROOT, ".test", "cache"))  # not the user's
# A background process of a shell inherits an ignored SIGINT, and passes it on to programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`")


def _long_tests():
    with open(os.path.join(ROOT, "third_party", "test", "long.txt")) as file:
        return {line.strip() for line in file if line.strip() and not line.startswith("#")}


def pytest_collect_directory(path, parent):
    """Collects a folder with an __init__.py as a plain folder. pytest would put a package's parent first on sys.path
    and import it by its own name; `deepspeed` would then be adapters/deepspeed in all later imports."""
    return pytest.Dir.from_parent(parent, path=path) if (path / "__init__.py").exists() else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    named = _long_tests()
    gone = set(named)
    for item in items:
        if item.nodeid in named:
            item.add_marker("full")
            gone.discard(item.nodeid)
    cases = [(item.nodeid.partition("[")[0], bool(item.get_closest_marker("full"))) for item in items]
    if config.args_source is config.ArgsSource.TESTPATHS:  # all tests were collected, in one process
        if gone:
            names = "\n".join(sorted(gone))
            raise pytest.UsageError(f"third_party/test/long.txt names tests that are not there:\n{names}")
        found = covered.complaints(cases, covered.read())
        if found:
            raise pytest.UsageError("third_party/test/covered.txt and the tests differ:\n" + "\n".join(found))
        for path in {item.path for item in items if item.get_closest_marker("alone")}:
            if "mark.alone" not in path.read_text():
                raise pytest.UsageError(f"{path}: write pytest.mark.alone, by which ./test finds the file")


def pytest_runtest_setup(item):
    """Skips tests with a reason; third_party/test/skips.txt lists the allowed skips."""
    if item.get_closest_marker("full") and not item.config.getoption("--full"):
        pytest.skip("takes long: runs with --full")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device, none here")
