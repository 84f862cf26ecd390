# SPDX-License-Identifier: Apache-2.0
"""Tests the command that makes a release: what it refuses, how it resumes, and that its bits repeat."""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import zipfile

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

PACKAGING = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, PACKAGING)
import install  # noqa: E402
import libraries  # noqa: E402
import release  # noqa: E402
import sbom  # noqa: E402
import torch_wheels  # noqa: E402

CHEAP = ["source", "bindings", "manual"]
VERSION = libraries.version()
ABOUT = {"version": "2.13.0+cpu", "name": "torch.whl", "sha256": "0" * 64, "licence": "BSD-3-Clause AND MIT"}


@pytest.fixture
def committed(monkeypatch):
    """Makes this checkout look unchanged, since tests also run before a commit."""
    commit = release.git("rev-parse", "HEAD")
    monkeypatch.setattr(release, "clean_commit", lambda: commit)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "")  # set by the release; restored after the test
    return commit


def verify(folder):
    """Returns the names in SHA256SUMS after sha256sum has checked them."""
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    names = [line.split("  ")[1] for line in (folder / "SHA256SUMS").read_text().splitlines()]
    assert sorted([*names, "SHA256SUMS"]) == sorted(os.listdir(folder))
    return names


def test_Release_TwoRuns_HaveTheSameSums(committed, tmp_path, capsys):
    release.release(str(tmp_path / "a"), [], CHEAP)
    release.release(str(tmp_path / "b"), [], CHEAP)
    assert (tmp_path / "a/SHA256SUMS").read_text() == (tmp_path / "b/SHA256SUMS").read_text()
    names = verify(tmp_path / "a")
    packed = [f"sluice-{VERSION}{kind}.tar.gz" for kind in ("", "-bindings", "-manual")]
    assert sorted(names) == sorted([*packed, f"sluice-{VERSION}.cdx.json"])
    said = capsys.readouterr().out
    assert all(said.count(f"release: {name}: ") == 2 for name in CHEAP), said
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]  # nothing is left of the work


def test_Release_Interrupted_GoesOnWithWhatWasFinished(committed, tmp_path, monkeypatch, capsys):
    def interrupted(folder):
        with open(os.path.join(folder, "torn"), "w"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(release, "make_manual", interrupted)
        with pytest.raises(KeyboardInterrupt):
            release.release(str(tmp_path / "a"), [], CHEAP)
    assert not (tmp_path / "a").exists()
    capsys.readouterr()
    release.release(str(tmp_path / "a"), [], CHEAP)
    said = capsys.readouterr().out
    assert said.count("by an earlier run") == 2 and "torn" not in said
    verify(tmp_path / "a")


def test_Release_OfAnotherCommit_TakesNothingOfAnEarlierOne(committed, tmp_path, monkeypatch, capsys):
    def never(folder):
        raise libraries.Failure("stop")

    with monkeypatch.context() as patch:
        patch.setattr(release, "make_bindings", never)
        with pytest.raises(libraries.Failure, match="stop"):
            release.release(str(tmp_path / "a"), [], CHEAP)
    monkeypatch.setattr(release, "clean_commit", lambda: "0" * 40)
    release.release(str(tmp_path / "a"), [], ["source"])
    assert "by an earlier run" not in capsys.readouterr().out


def test_Release_ThatAnotherRunIsMaking_IsRefused(committed, tmp_path):
    out = str(tmp_path / "a")
    with release.held(release.work_folder(out, committed)):
        with pytest.raises(libraries.Failure, match="another run is making"):
            release.release(out, [], CHEAP)


@pytest.mark.parametrize(
    ("there", "only", "url", "message"),
    [
        ("a", CHEAP, None, "a exists and is not empty: remove it, or name another"),
        ("a/file", CHEAP, None, "a exists and is not empty: remove it, or name another"),
        (None, ["rpm"], None, "there is no rpm: choose among source, bindings"),
        (None, ["recipes"], None, "recipes name the address of the archive: give it with --url"),
        (None, ["recipes"], "https://example.org", "recipes contain the checksum of the archive: name archive too"),
    ],
)
def test_Release_ThatCannotBeMade_IsRefused(committed, tmp_path, there, only, url, message):
    if there is not None:
        (tmp_path / there).parent.mkdir(exist_ok=True)
        (tmp_path / there).write_text("of the user")
    with pytest.raises(libraries.Failure, match=message):
        release.release(str(tmp_path / "a"), [], only, url)
    assert there is None or (tmp_path / there).read_text() == "of the user"


def test_Release_Recipes_AreOfItsArchiveAndAddress(committed, tmp_path, monkeypatch):
    name = f"sluice-{VERSION}-linux-x86_64.tar.gz"

    def make_archive(folder):
        with open(os.path.join(folder, name), "w") as file:
            file.write("archive")

    monkeypatch.setattr(release, "make_archive", make_archive)
    release.release(str(tmp_path / "a"), [], ["archive", "recipes"], "https://example.org/sluice/")
    packed = next(found for found in verify(tmp_path / "a") if found.endswith("recipes.tar.gz"))
    with tarfile.open(tmp_path / "a" / packed) as tar:
        files = {entry.name: tar.extractfile(entry).read().decode() for entry in tar.getmembers() if entry.isfile()}
    texts = [text for path, text in files.items() if path.endswith(("recipe.yaml", "package.py"))]
    assert len(texts) == 2
    for text in texts:
        assert f"https://example.org/sluice/{name}" in text and hashlib.sha256(b"archive").hexdigest() in text
        assert "@" not in text.replace("openmpi@", "")  # each name of the template has its value


def test_Release_ChangedFiles_AreRefusedByName(tmp_path, monkeypatch):
    monkeypatch.setattr(release, "ROOT", str(tmp_path))
    with pytest.raises(libraries.Failure, match="is not a git checkout"):
        release.clean_commit()
    author = ["-c", "user.name=a", "-c", "user.email=b"]
    for command in (["init", "-q"], [*author, "commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    assert len(release.clean_commit()) == 40
    (tmp_path / "new.txt").write_text("")
    with pytest.raises(libraries.Failure, match=r"1 files differ from the commit \(new.txt\): commit, stash or remove"):
        release.clean_commit()


def test_Torch_ThatPipLacks_IsRefusedByName(tmp_path):
    with pytest.raises(libraries.Failure, match=r"pip has no torch 0\.0\.1 .*: name those to use with --torch"):
        torch_wheels.fetch("0.0.1", str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_Bill_IsOneByTheSchema_AndNamesFilesAndTorches(tmp_path):
    paths = [tmp_path / name for name in ("a.tar.gz", "b.whl")]
    for path in paths:
        path.write_text(path.name)
    made = sbom.text(list(map(str, paths)), [ABOUT], VERSION, "c" * 40, 1000000000)
    assert made == sbom.text(list(map(str, paths)), [ABOUT], VERSION, "c" * 40, 1000000000)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(made) is None
    bill = json.loads(made)
    found = {item["name"]: item for item in bill["components"]}
    for path in paths:
        assert found[path.name]["hashes"] == [
            {"alg": "SHA-256", "content": hashlib.sha256(path.read_bytes()).hexdigest()}
        ]
    assert found["torch"]["version"] == ABOUT["version"] and found["torch"]["hashes"][0]["content"] == ABOUT["sha256"]
    assert all(item.get("licenses") for item in found.values())
    needs = {item["ref"]: item.get("dependsOn", []) for item in bill["dependencies"]}
    assert needs["b.whl"] == ["cffi", "torch-2.13.0+cpu"] and needs["a.tar.gz"] == []


def code(path, folder):
    """Returns the executable sections, and the required symbols. The linker may export end markers (`_end`)."""
    sections = {}
    for name in (".text", ".rodata", ".data", ".plt"):
        libraries.run("objcopy", "-O", "binary", f"--only-section={name}", path, str(folder / "section"))
        sections[name] = (folder / "section").read_bytes()
    assert all(sections.values())
    return sections, libraries.run("nm", "-D", "--undefined-only", path)


@pytest.mark.full  # downloads two builds of one torch, 800 MB, and compiles the adapter for each
@pytest.mark.timeout(3000)
def test_Adapter_OfTheCpuBuildAndOfTheCudaBuild_AreTheSameCode(tmp_path):
    top = tmp_path / "stage"
    install.stage(str(top), install.build_libraries(str(tmp_path / "lib")), VERSION)
    made = []
    # `===2.13.0` matches exactly this name, which is the CUDA build on PyPI.
    builds = [torch_wheels.fetch(version, str(tmp_path)) for version in ("2.13.0+cpu", "=2.13.0")]
    for number, build in enumerate(builds):
        abi = torch_wheels.cxx11_abi(build)
        command = [sys.executable, install.TORCH_ADAPTER, "--unpacked", build, str(abi)]
        path = install.ship_adapter(str(top), command, str(tmp_path / f"cache{number}"))
        assert abi == 1
        for other in builds:
            assert torch_wheels.missing(path, other) == []
        with open(f"{path}.stamp") as stamp:
            said = {name: value for name, value in json.load(stamp).items() if name != "sha256"}
        made.append((said, code(path, tmp_path)))
        os.remove(path)  # otherwise the next build takes the package's own
        assert os.listdir(tmp_path / f"cache{number}")
    cpu, cuda = (torch_wheels.about(build) for build in builds)
    assert cpu["cuda"] is None and cuda["cuda"] is not None and cpu["git_version"] == cuda["git_version"]
    assert made[0] == made[1]


@pytest.mark.full  # downloads four torches, 2 GB, and compiles the adapter for each
@pytest.mark.timeout(7200)
def test_Release_Whole_HasEveryArtifact(committed, tmp_path):
    release.release(str(tmp_path / "a"), list(release.TORCH), None, "https://example.org/sluice")
    names = verify(tmp_path / "a")
    assert len(names) == 10, names
    with zipfile.ZipFile(next((tmp_path / "a").glob("*.whl"))) as wheel:
        shipped = {os.path.basename(name) for name in wheel.namelist() if "/shipped/" in name}
    adapters = {f"_torch_{version.replace('.', '_')}.so" for version in release.TORCH}
    assert shipped == adapters | {f"{name}.stamp" for name in adapters}
