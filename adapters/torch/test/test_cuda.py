# SPDX-License-Identifier: Apache-2.0
"""Tests CUDA tensors as far as possible without a GPU: device, stream, memory; errors; NCCL's id.

The library runs on a fake driver, cuBLAS and NCCL (capi/test/cuda/fake_gpu.c). On a GPU, integration_tests/gpu runs the
same against PyTorch.
"""

import os
import pathlib
import subprocess
import tempfile

import pytest
import torch
from ranks import ForkServer
from sluice.adapters.torch import Context, device_of
from sluice.errors import InvalidArgument, Unsupported

ROOT = pathlib.Path(__file__).resolve().parents[3]
JOBS = pathlib.Path(__file__).resolve().parent / "cuda_jobs.py"


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
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}


@pytest.fixture(scope="session")
def jobs(fakes):
    """Runs a job on one or two ranks: forks of a process that has imported torch but not the library."""
    server = ForkServer(("torch", "torch.distributed", "torch._dynamo"), fakes)

    def start(log, *arguments, **environment):
        return server.start(str(JOBS), arguments, {**fakes, **environment}, str(ROOT), log.fileno())

    def run(*arguments, ranks=(None,), **environment):
        job, *rest = arguments
        with tempfile.TemporaryDirectory() as folder:
            logs = [open(os.path.join(folder, str(rank)), "w+") for rank in ranks]
            words = [[job, *([] if rank is None else [str(rank)]), *rest] for rank in ranks]
            processes = [start(log, *each, **environment) for log, each in zip(logs, words)]
            try:
                codes = [process.wait(200) for process in processes]
            finally:
                for process in processes:
                    process.kill()
            texts = []
            for log in logs:
                log.seek(0)
                texts.append(log.read())
                log.close()
        if any("has no CUDA kernels" in text for text in texts):
            pytest.skip("this libsluice was built without nvcc")
        assert not any(codes), "\n".join(texts)
        return texts

    return run


@pytest.fixture
def run(jobs):
    """Returns the output of a job of one process."""
    return lambda *arguments: jobs(*arguments)[0]


def test_Layer_OnAPretendedDevice_MatchesAutogradUnderEveryPolicy(run):
    assert run("layer").count("matches") == 3


def test_Layer_UnderACapacity_IsThatOfExactExchangesAndCountsWhatItDrops(run):
    text = run("capacities")
    assert "cpu matches" in text
    assert "cuda:0 matches; without a capacity: " in text


def test_Layer_ExpertsOfTheHostOnAPretendedDevice_MatchAutogradAndFailCleanly(run):
    assert run("modules").count("matches") == 4


def test_Tuner_ProfileByTheDevicesName_PredictsWhileTraining(run):
    text = run("profile")
    assert "no profile is of a NVIDIA Made-Up 9000; there are those of A100, H200, V100" in text
    assert "predicted" in text


def test_Layer_TensorsElsewhereAndWhatIsNotThere_AreRefusedByName(run):
    refused = [line for line in run("refusals").split("\n") if line.startswith("refused: ")]
    words = [("tokens is on meta", ".to("), ("w1 of local expert 0 is on meta", ".to("), ('"native"', "cublas")]
    assert len(refused) == len(words)
    for line, wanted in zip(refused, words):
        assert all(word in line for word in wanted), line


def test_DeepSpeed_ExpertsOnAPretendedDevice_MatchStock(run):
    pytest.importorskip("deepspeed")
    text = run("deepspeed")
    assert text.count("matches stock, computed by sluice") == 2
    assert text.count("matches stock, computed by host modules") == 2


def test_TransformersExpertParallel_ExpertsOnAPretendedDevice_MatchStock(run, tmp_path):
    pytest.importorskip("transformers.distributed.expert_parallel")
    text = run("expert_parallel", str(tmp_path / "store"))
    assert text.count("sluice matches stock, computed by sluice") == 1
    for implementation in ("eager", "grouped_mm"):
        assert f"{implementation} matches stock, computed by the module's own functions" in text


def test_TransformersExpertParallel_RefusalOfAFirstCall_IsSaidOnItsDevice(run):
    pytest.importorskip("transformers.distributed.expert_parallel")
    assert "asked for cuda:0" in run("refusal")


def test_Layer_TwoProcessesOverNccl_MatchAutogradUnderEveryPolicy(jobs, tmp_path):
    messages = tmp_path / "messages"
    messages.mkdir()
    texts = jobs("ranks", str(tmp_path / "store"), ranks=range(2), SLUICE_FAKE_NCCL_FOLDER=str(messages))
    assert [text.count("matches") for text in texts] == [4, 4]
    left = [path.name for path in messages.iterdir() if "-to-" in path.name]
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
