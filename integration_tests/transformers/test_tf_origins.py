# SPDX-License-Identifier: Apache-2.0
"""Tests checkpoints of third parties: the Sluice keys that a config may have, and that nothing is loaded, read or
written for it.

Under expert parallelism: test_tf_parallel.py.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import sluice
import tf_models
from sluice.config import ConfigError
from sluice.errors import SluiceError
from transformers import AutoConfig, AutoModelForCausalLM

USERS_FILE = "import torch\n"


@pytest.fixture
def checkpoint(saved: Any, tmp_path: Path) -> Any:
    """Writes a checkpoint whose config.json has this section."""

    def make(section: Any) -> str:
        folder, own = tmp_path / "downloaded", Path(saved("mixtral"))
        folder.mkdir()
        for file in own.iterdir():
            if file.name != "config.json":
                (folder / file.name).symlink_to(file)
        values = json.loads((own / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**values, "sluice": section}))
        return str(folder)

    return make


@pytest.fixture
def library(tmp_path: Path) -> tuple[str, Path]:
    """Builds a library that writes a file when it is loaded, and returns both paths."""
    trace = tmp_path / "was_loaded"
    source = tmp_path / "hostile.c"
    source.write_text(
        "#include <fcntl.h>\n#include <unistd.h>\n"
        f'__attribute__((constructor)) static void run(void) {{ close(open("{trace}", O_CREAT | O_WRONLY, 0600)); }}\n'
    )
    made = tmp_path / "libhostile.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(made), str(source)], check=True, timeout=120)
    return str(made), trace


def load(path: str, **more: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, experts_implementation="sluice", **more)


def refused(path: str, *words: str) -> None:
    model = load(path)
    for _ in range(2):  # a notebook's user runs a cell again after its error
        with pytest.raises(ConfigError) as caught:
            tf_models.step(model, tf_models.batch())
        for word in ("the model's own config", "sluice.configure(", *words):
            assert word in str(caught.value), caught.value


def test_Library_NamedByAModel_IsNotLoaded(checkpoint: Any, library: tuple[str, Path]) -> None:
    """Also if the user has chosen the GEMMs that it would serve."""
    path, trace = library
    sluice.configure(gemm="blas")
    refused(checkpoint({"gemm_library": path}), '"gemm_library" (it names code to load)')
    assert not trace.exists()
    sluice.configure(gemm="blas", gemm_library=path)  # from the user: it is loaded, and is no BLAS
    with pytest.raises(SluiceError, match="libhostile"):
        tf_models.step(tf_models.make("mixtral"), tf_models.batch())
    assert trace.exists()


@pytest.mark.parametrize("key", ["decisions", "machine", "pinned", "cache"])
def test_File_NamedByAModel_StaysAsItIs(checkpoint: Any, tmp_path: Path, key: str) -> None:
    own = tmp_path / "train.py"
    own.write_text(USERS_FILE)
    named = str(tmp_path / "folder" if key == "cache" else own)
    refused(checkpoint({"memory_budget": "64MiB", "tuner": {key: named, "calibrate": 0.1}}), f'"tuner.{key}"')
    assert own.read_text() == USERS_FILE
    assert sorted(path.name for path in tmp_path.iterdir()) == ["downloaded", "train.py"]


def test_Checkpoint_OfTheUsersOwn_RunsOnceTheKeyIsMoved(checkpoint: Any) -> None:
    """The remedies are those of the message and of docs/security.md."""
    path = checkpoint({"gemm": "native", "chunks": 1})
    refused(path, "sluice.configure(gemm=...)")
    config = AutoConfig.from_pretrained(path)
    del config.sluice["gemm"]
    sluice.configure(gemm="native")
    model = load(path, config=config)
    tf_models.step(model, tf_models.batch())
    assert all(
        sluice.stats(module)["contexts"][0]["gemm"].startswith("native") for module in tf_models.experts_of(model)
    )
