# SPDX-License-Identifier: Apache-2.0
"""Tests determinism: the same bits in every run at one thread count, and a limited difference between thread counts.

With gemm "native" one thread sums each element in a fixed order, so two threads give the bits of one. Other GEMMs
(torch's, oneDNN's) may be divided differently for two threads, and "auto" may choose other GEMMs. Then f32 sums run in
another order, and 16-bit intermediates can round differently.
"""

from pathlib import Path
from typing import Any

import pytest
import tf_compare
import tf_families
import torch
from tf_ranks import TransformersRanks

# Relative to the largest value of a tensor: f32 sums in another order; 16-bit intermediates that round the other way.
DISTANCE = {"float32": 64 * 2.0**-24, "bfloat16": 2 * 2.0**-8}


def run(path: str, threads: int, gemm: str | None, dtype: str) -> None:
    """Rank-side: saves the output and all gradients of an experts block."""
    import sluice

    torch.set_num_threads(threads)
    sluice.configure(gemm=gemm)
    module = tf_families.make("qwen3_moe", 192, 160, 8).to(getattr(torch, dtype))
    found = [tf_compare.run(module, tf_compare.rows(192, 8, 96, 2), getattr(torch, dtype)) for _ in range(2)]
    if gemm is not None:  # otherwise the library may change between two calls
        assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    torch.save(found[0], path)


def _has_native() -> bool:
    flags = Path("/proc/cpuinfo").read_text()
    return "avx512f" in flags or all(flag in flags for flag in ("avx2", "fma", "f16c"))


@pytest.mark.parametrize("dtype", DISTANCE)
@pytest.mark.parametrize("gemm", ["native", None])
def test_Threads_OneAndTwo_SameBitsOrWithinTheStatedDistance(tmp_path: Path, gemm: str | None, dtype: str) -> None:
    """With gemm "native" the bits at 1 and 2 threads are the same, otherwise within DISTANCE. Each run is in a new
    process, since a process chooses its GEMM once."""
    if gemm == "native" and not _has_native():
        pytest.skip("gemm native needs AVX-512 or AVX2")
    runs: list[dict[str, Any]] = []
    for threads in (1, 2, 2):
        with TransformersRanks(1) as ranks:
            ranks.run("test_tf_threads:run", path=str(tmp_path / "run"), threads=threads, gemm=gemm, dtype=dtype)
        runs.append(torch.load(tmp_path / "run"))
    one, two, again = runs
    if gemm == "native":
        assert all(torch.equal(two[name], again[name]) and torch.equal(one[name], two[name]) for name in two)
    for name, value in one.items():
        off = (two[name].double() - value.double()).abs().max() / value.double().abs().max()
        assert off <= DISTANCE[dtype], (name, off)
