# SPDX-License-Identifier: Apache-2.0
"""Tests the recipes for conda and Spack: packages made from them contain the archive's files."""

import os
import runpy
import shutil
import sys
import types

import libraries
import pytest
import rattler_build
import recipes
from rattler_build import cli_api

INSTALLED = ("include/sluice/sluice.h", "lib/libsluice.so.0", "lib/pkgconfig/sluice.pc", "share/man/man3")


@pytest.fixture(scope="module")
def written(made, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    recipes.write(str(folder), str(next(made.glob("*.tar.gz"))), made.as_uri(), libraries.version())
    return folder


def conda(recipe, folder):
    """Builds and tests the package with rattler-build, which may use no channel of the network."""
    for platform in ("linux-64", "noarch"):
        (folder / "channel" / platform).mkdir(parents=True)
        about = (
            f'{{"info": {{"subdir": "{platform}"}}, "packages": {{}}, "packages.conda": {{}}, "repodata_version": 1}}'
        )
        (folder / "channel" / platform / "repodata.json").write_text(about)
    with pytest.warns(DeprecationWarning, match="build_recipes"):
        cli_api.build_recipes([str(recipe)], channel=[(folder / "channel").as_uri()], output_dir=folder / "out")
    return next((folder / "out/linux-64").glob("*.conda"))


def test_Conda_BuildsThePackageAndItsTestsPass(written, tmp_path):
    package = conda(written / "conda/recipe.yaml", tmp_path)
    assert package.name.startswith(f"libsluice-{libraries.version()}-")


def test_Conda_OtherBitsThanTheReleases_AreRefused(written, tmp_path):
    text = (written / "conda/recipe.yaml").read_text()
    digest = next(line for line in text.splitlines() if "sha256:" in line)
    (tmp_path / "recipe.yaml").write_text(text.replace(digest, f"  sha256: {'0' * 64}"))
    with pytest.raises(rattler_build.RattlerBuildError, match="(?i)checksum|sha256"):
        conda(tmp_path / "recipe.yaml", tmp_path)


class Spec:
    def __init__(self, *variants):
        self.variants = variants

    def satisfies(self, variant):
        return variant in self.variants


@pytest.mark.parametrize("variant", ["+mpi", "~mpi"])
def test_Spack_Installs_TheArchive(written, unpacked, tmp_path, monkeypatch, variant):
    """Tests do not install Spack: a module with the names of spack.package replaces it."""
    said = {}
    spack, package = types.ModuleType("spack"), types.ModuleType("spack.package")
    for name in ("license", "version", "variant", "depends_on", "requires"):
        setattr(package, name, lambda *words, name=name, **more: said.setdefault(name, []).append((words, more)))
    package.Package = object
    package.join_path = os.path.join
    package.install_tree = lambda source, to: shutil.copytree(source, to, symlinks=True)
    monkeypatch.setitem(sys.modules, "spack", spack)
    monkeypatch.setitem(sys.modules, "spack.package", package)
    recipe = runpy.run_path(str(written / "spack/packages/sluice/package.py"))["Sluice"]
    assert [words for words, _ in said["version"]] == [(libraries.version(),)]
    assert said["depends_on"] == [(("openmpi@4.1:5",), {"when": "+mpi", "type": ("link", "run")})]
    monkeypatch.chdir(unpacked)
    recipe().install(Spec(variant), str(tmp_path / "prefix"))
    assert all((tmp_path / "prefix" / name).exists() for name in INSTALLED)
    libs = os.listdir(tmp_path / "prefix/lib")
    assert ("libsluice_mpi.so" in libs) == (variant == "+mpi") and not [name for name in libs if "debug" in name]
