# SPDX-License-Identifier: Apache-2.0
"""Tests determinism: the same bits in every run at one thread count, and a limited difference between thread counts.

With gemm "native" one thread sums each element in a fixed order, so two threads give the bits of one. Other GEMMs
(torch's, oneDNN's) may be divided differently for two threads, and "auto" may choose other GEMMs. Then f32 sums run in
another order, and 16-bit intermediates can round differently.
"""

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
sys.path.append(str(ROOT / "third_party" / "test"))
from fork_server import ForkServer  # noqa: E402

# The imports of a block, except Sluice, which reads SLUICE_GEMM.
IMPORTS = ("torch", "torch._dynamo", "transformers.models.qwen3_moe.modeling_qwen3_moe")
GEMMS = ("native", "auto")

# Relative to the largest value of a tensor: f32 sums in another order; 16-bit intermediates that round the other way.
DISTANCE = {"float32": 64 * 2.0**-24, "bfloat16": 2 * 2.0**-8}


def _block(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Returns the output and all gradients of an experts block."""
    from integration_tests.benchmarks.experts.experts_block import Shape, make_module, make_rows

    shape = Shape(192, 160, 8, 2)
    module, rows = make_module(shape, dtype), make_rows(shape, 96, dtype)
    tokens, weights = rows.tokens.requires_grad_(), rows.weights.requires_grad_()
    out = module(tokens, rows.ids, weights)
    out.backward(rows.grad)
    found = {"out": out.detach(), "tokens": tokens.grad, "weights": weights.grad}
    return found | {name: parameter.grad for name, parameter in module.named_parameters()}


@functools.cache
def _server() -> ForkServer:
    return ForkServer(IMPORTS, {**os.environ, "OPENBLAS_NUM_THREADS": "1"})  # NumPy's threads would exist at the forks


@functools.cache
def _run(run: int, threads: int, gemm: str) -> dict[str, dict[str, torch.Tensor]]:
    """Runs the block of each dtype in a new process, since a process chooses its GEMM once."""
    environment = {**os.environ, "SLUICE_GEMM": "" if gemm == "auto" else gemm}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        path = Path(folder) / f"{run}.pt"
        process = _server().start(str(HERE), [str(path), str(threads)], environment, folder, log.fileno())
        try:
            code = process.wait(280)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        log.seek(0)
        assert code == 0, log.read().decode()[-3000:]
        return torch.load(path)


def _has_native() -> bool:
    flags = Path("/proc/cpuinfo").read_text()
    return "avx512f" in flags or all(flag in flags for flag in ("avx2", "fma", "f16c"))


def _furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Returns the largest difference of a tensor over its largest value, and its name."""
    return max(
        ((a[name].double() - b[name].double()).abs().max().item() / b[name].double().abs().max().item(), name)
        for name in a
    )


@pytest.mark.parametrize("dtype", DISTANCE)
@pytest.mark.parametrize("gemm", GEMMS)
def test_Threads_OneAndTwo_SameBitsOrWithinTheStatedDistance(gemm: str, dtype: str) -> None:
    """With gemm "native" the bits at 1 and 2 threads are the same, otherwise within DISTANCE. Two runs with two threads
    have the same bits."""
    if gemm == "native" and not _has_native():
        pytest.skip("gemm native needs AVX-512 or AVX2")
    one, two = _run(0, 1, gemm)[dtype], _run(0, 2, gemm)[dtype]
    assert one.keys() == two.keys()
    if gemm == "native":
        again = _run(1, 2, gemm)[dtype]
        assert all(torch.equal(two[name], again[name]) for name in two)
        assert all(torch.equal(one[name], two[name]) for name in one)
    off, name = _furthest(two, one)
    print(f"gemm {gemm}, {dtype}: 1 and 2 threads differ by {off:.2e} of the largest value, in {name}")
    assert off <= DISTANCE[dtype], name


def _main() -> None:
    path, threads = sys.argv[1:]
    sys.path.insert(0, str(ROOT))
    torch.set_num_threads(int(threads))
    import sluice  # noqa: F401  (registers)

    found = {}
    for dtype in DISTANCE:
        found[dtype] = first = _block(getattr(torch, dtype))
        if os.environ["SLUICE_GEMM"] == "":
            continue  # the library may change between two calls
        second = _block(getattr(torch, dtype))
        assert all(torch.equal(first[name], second[name]) for name in first), "two runs of one process differ"
    torch.save(found, path)


if __name__ == "__main__":
    _main()
