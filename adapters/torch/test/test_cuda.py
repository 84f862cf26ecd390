# SPDX-License-Identifier: Apache-2.0
"""Tests CUDA tensors as far as possible without a GPU: device, stream, memory; errors; NCCL's id.

The library runs on a fake driver, cuBLAS and NCCL (capi/test/cuda/fake_gpu.c). On a GPU, integration_tests/gpu runs the
same against PyTorch.
"""

import os
import pathlib
import subprocess

import pytest
import ranks
import torch
from sluice.adapters.torch import Context, device_of
from sluice.errors import InvalidArgument, Unsupported

ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def fakes(tmp_path_factory):
    """Returns the environment in which libsluice finds the fakes as NVIDIA's libraries."""
    built = os.environ.get("SLUICE_FAKE_GPU")
    if built is None:
        target = "//capi/test/cuda:libfake_gpu.so"
        subprocess.run(["nice", "bazel", "build", target], cwd=ROOT, check=True, capture_output=True)
        info = subprocess.run(["bazel", "info", "bazel-bin"], cwd=ROOT, check=True, capture_output=True, text=True)
        built = os.path.join(info.stdout.strip(), "capi/test/cuda/libfake_gpu.so")
    folder = tmp_path_factory.mktemp("fakes")
    for name in ("libcuda.so.1", "libcublas.so.13", "libcublasLt.so.13", "libnccl.so.2"):
        (folder / name).symlink_to(built)
    return {"LD_LIBRARY_PATH": str(folder)}


@pytest.fixture
def run(fakes):
    def run(job, world=1, **arguments):
        try:
            ranks.run(world, f"cuda_jobs:{job}", extra_environment=fakes, **arguments)
        except AssertionError as error:
            if "has no CUDA kernels" in str(error):
                pytest.skip("this libsluice was built without nvcc")
            raise

    return run


# By job, which checks and describes a claim: a module that it needs, "": torch alone.
JOBS = {
    "layers": "",
    "capacities": "",
    "modules": "",
    "profile_by_the_devices_name": "",
    "refusals": "",
    "deepspeed_layers": "deepspeed",
    "expert_parallel": "transformers.distributed.expert_parallel",
    "first_call_refused": "transformers.distributed.expert_parallel",
}


@pytest.mark.parametrize("job", JOBS)
def test_Job_OnAPretendedDevice_HoldsWhatItChecks(run, job):
    if JOBS[job]:
        pytest.importorskip(JOBS[job])
    run(job)


def test_Layer_TwoProcessesOverNccl_MatchAutogradUnderEveryPolicy(run, tmp_path):
    run("over_nccl", 2, folder=str(tmp_path))
    left = [path.name for path in tmp_path.iterdir() if "-to-" in path.name]
    assert not left, "messages that no rank received"


def test_DeviceOf_MixedDevices_NamesBothAndTheRemedy():
    cpu, meta = torch.zeros(1), torch.zeros(1, device="meta")
    assert device_of([("a", cpu), ("b", cpu)]) == torch.device("cpu")
    assert device_of([]) == torch.device("cpu")
    with pytest.raises(InvalidArgument, match=r"w2 is on meta and w1 on cpu.*\.to\('cpu'\)"):
        device_of([("w1", cpu), ("w2", meta)])
    with pytest.raises(InvalidArgument, match="w1 is on the meta device"):
        device_of([("w1", meta)])


def test_Context_OnADeviceThatIsNotThere_IsRefused():
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    with pytest.raises(Unsupported, match="has no CUDA device"):
        Context(device="cuda:0")
    with pytest.raises(Unsupported, match="on the CPU and on CUDA devices"):
        Context(device="meta")
