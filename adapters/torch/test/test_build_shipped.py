# SPDX-License-Identifier: Apache-2.0
"""Tests the shared objects in a wheel: one per release of torch, preferred over all others if it fits."""

import hashlib
import json
import os

import pytest
import torch
from sluice import doctor
from sluice.adapters.torch import build, stamps
from test_build import calls
from test_build_trust import SOMEBODY, as_root, cache  # noqa: F401

FITTING = {"compiler": "another", "libc": "another", "python": "another"}  # a shipped object need not match these


def ship(**changes):
    """Adds a shipped object, as packaging does."""
    path = build.shipped_path()
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write("shipped")
    stamp = {**stamps.for_any_build(build.wanted()), "sha256": hashlib.sha256(b"shipped").hexdigest(), **changes}
    with open(f"{path}.stamp", "w") as file:
        json.dump(stamp, file)
    return path


def test_Ensure_ShippedOne_IsTakenBeforeOthersAndNeedsNoCompiler(cache, tmp_path, monkeypatch):  # noqa: F811
    build.make(os.path.join(build.HERE, build.file_name()))
    before = calls(tmp_path)
    path = ship()
    assert os.path.basename(path) == f"_torch_{torch.__version__.partition('+')[0].replace('.', '_')}.so"
    assert build.ensure() == path and calls(tmp_path) == before
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.ensure() == path
    (finding,) = doctor._torch_adapter()
    assert finding.detail == f"shipped for this torch: {path}"


@pytest.mark.parametrize("local", ["+cpu", "+cu130", ""])
def test_Ensure_ShippedOne_FitsEveryBuildOfItsRelease(cache, monkeypatch, local):  # noqa: F811
    path = ship(**FITTING)
    monkeypatch.setattr(torch, "__version__", torch.__version__.partition("+")[0] + local)
    assert build.ensure() == path


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"torch": "2.13.0 of other sources"}, "its torch is '2.13.0 of other sources'"),
        ({"made_from": "another"}, "its made_from is 'another'"),
        ({"machine": "another"}, "its machine is 'another'"),
        ({"sha256": "another"}, "not what its stamp says"),
    ],
)
def test_Ensure_ShippedOneThatDoesNotFit_IsPassedOverWithAWord(cache, capfd, changes, says):  # noqa: F811
    ship(**changes)
    assert build.ensure().startswith(f"{cache}/") and says in capfd.readouterr().err


def test_Ensure_AnotherRelease_HasNone(cache, monkeypatch):  # noqa: F811
    path = ship()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert build.shipped_path() != path and build.ensure().startswith(f"{cache}/")


@as_root
def test_Ensure_ShippedOne_IsAsTrustedAsThePackagesOwner(cache, tmp_path, monkeypatch, capfd):  # noqa: F811
    path = ship()
    os.chown(path, SOMEBODY, -1)
    assert build.ensure() != path and f"it belongs to user {SOMEBODY}" in capfd.readouterr().err
    os.chown(f"{path}.stamp", SOMEBODY, -1)
    module = tmp_path / "package" / "build.py"
    module.write_text("")
    os.chown(module, SOMEBODY, -1)
    monkeypatch.setattr(build, "__file__", str(module))
    assert build.ensure() == path
