# SPDX-License-Identifier: Apache-2.0
"""Configures these tests: helpers are imported by name, and SLUICE in the environment must not affect the tests."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "deepspeed")]  # the latter for its harness of ranks
from rank_harness import fixture_of, ranks_rest  # noqa: E402, F401
from tf_ranks import TransformersRanks  # noqa: E402

for name in ("SLUICE", "SLUICE_OPTIONS"):
    os.environ.pop(name, None)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """Forgets at the end of each test what it has configured."""
    yield
    import sluice  # after the switches above are gone

    sluice.configure()


@pytest.fixture
def one_gemm() -> None:
    """Fixes the GEMM library for tests that compare bits of two calls: otherwise it may change between the calls."""
    import sluice

    sluice.configure(gemm="native")


ranks, four_ranks = fixture_of(lambda: TransformersRanks(2)), fixture_of(lambda: TransformersRanks(4))
fresh2 = fixture_of(lambda: TransformersRanks(2), "function")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a function that saves a model once and returns its path. changes: fields of its config."""
    import tf_models  # these import transformers
    import tf_quantised

    folder = tmp_path_factory.mktemp("models")

    def path(kind: str = "qwen3_moe", quantised: bool = False, **changes: int) -> str:
        found = folder / "-".join([kind, *(f"{key}{value}" for key, value in changes.items()), str(quantised)])
        if not found.exists() and quantised:
            tf_quantised.write(kind, found)
        elif not found.exists():
            tf_models.make(kind, **changes).save_pretrained(found)
        return str(found)

    return path
