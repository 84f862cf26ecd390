"""CUDA tensors, as far as possible without a GPU: device, stream, memory; errors; NCCL's id.

The library below runs on the fake driver, cuBLAS and NCCL (capi/test/cuda/fake_gpu.c); on a GPU
integration_tests/gpu runs the same against PyTorch.
"""

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from sluice.adapters.torch import Context, device_of
from sluice.errors import InvalidArgument, Unsupported

ROOT = pathlib.Path(__file__).resolve().parents[3]
JOBS = pathlib.Path(__file__).resolve().parent / "cuda_jobs.py"


@pytest.fixture(scope="session")
def fakes(tmp_path_factory):
    """The environment in which libsluice finds the fakes as NVIDIA's libraries."""
    built = os.environ.get("SLUICE_FAKE_GPU")
    if built is None:
        target = "//capi/test/cuda:libfake_gpu.so"
        subprocess.run(["nice", "bazel", "build", target], cwd=ROOT, check=True, capture_output=True)
        info = subprocess.run(["bazel", "info", "bazel-bin"], cwd=ROOT, check=True, capture_output=True, text=True)
        built = os.path.join(info.stdout.strip(), "capi/test/cuda/libfake_gpu.so")
    folder = tmp_path_factory.mktemp("fakes")
    for name in ("libcuda.so.1", "libcublas.so.13", "libcublasLt.so.13", "libnccl.so.2"):
        (folder / name).symlink_to(built)
    return {**os.environ, "LD_LIBRARY_PATH": str(folder), "OMP_NUM_THREADS": "1"}


def run(environment, *arguments):
    done = subprocess.run(
        [sys.executable, str(JOBS), *arguments], env=environment, capture_output=True, text=True, timeout=200
    )
    if "has no CUDA kernels" in done.stderr:
        pytest.skip("this libsluice was built without nvcc")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_Layer_OnAPretendedDevice_MatchesAutogradUnderEveryPolicy(fakes):
    assert run(fakes, "layer").count("matches") == 3


def test_Layer_UnderACapacity_IsThatOfExactExchangesAndCountsWhatItDrops(fakes):
    text = run(fakes, "capacities")
    assert "cpu matches" in text
    assert "cuda:0 matches; without a capacity: " in text


def test_Layer_ExpertsOfTheHostOnAPretendedDevice_MatchAutogradAndFailCleanly(fakes):
    assert run(fakes, "modules").count("matches") == 3


def test_Tuner_ProfileByTheDevicesName_PredictsWhileTraining(fakes):
    text = run(fakes, "profile")
    assert "no profile is of a NVIDIA Made-Up 9000; there are those of A100, H200, V100" in text
    assert "predicted" in text


def test_Dlpack_MemoryOfSomebodyElse_IsATensorOfEveryDtype(fakes):
    assert "borrowed" in run(fakes, "borrowed")


def test_Layer_TensorsElsewhereAndWhatIsNotThere_AreRefusedByName(fakes):
    refused = [line for line in run(fakes, "refusals").split("\n") if line.startswith("refused: ")]
    words = [
        ("tokens is on meta", ".to("),
        ("w1 of local expert 0 is on meta", ".to("),
        ('"native"', "cublas"),
    ]
    assert len(refused) == len(words)
    for line, wanted in zip(refused, words):
        assert all(word in line for word in wanted), line


def test_DeepSpeed_ExpertsOnAPretendedDevice_MatchStock(fakes):
    pytest.importorskip("deepspeed")
    text = run(fakes, "deepspeed")
    assert text.count("matches stock, computed by sluice") == 2
    assert text.count("matches stock, computed by host modules") == 2


def test_Transformers_ExpertsOnAPretendedDevice_MatchStock(fakes):
    pytest.importorskip("transformers")
    text = run(fakes, "transformers")
    assert text.count("matches stock, computed by sluice") == 1
    assert text.count("matches stock, computed by the module's own functions") == 1


def test_TransformersExpertParallel_ExpertsOnAPretendedDevice_MatchStock(fakes, tmp_path):
    pytest.importorskip("transformers.distributed.expert_parallel")
    text = run(fakes, "expert_parallel", str(tmp_path / "store"))
    assert text.count("sluice matches stock, computed by sluice") == 1
    for implementation in ("eager", "grouped_mm"):
        assert f"{implementation} matches stock, computed by the module's own functions" in text


def test_TransformersExpertParallel_RefusalOfAFirstCall_IsSaidOnItsDevice(fakes):
    pytest.importorskip("transformers.distributed.expert_parallel")
    assert "asked for cuda:0" in run(fakes, "refusal")


def run_ranks(environment, *arguments):
    """Two processes of the job; what each said."""
    ranks = [
        subprocess.Popen(
            [sys.executable, str(JOBS), arguments[0], str(r), *arguments[1:]],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(2)
    ]
    texts = [rank.communicate(timeout=200)[0] for rank in ranks]
    if any("has no CUDA kernels" in text for text in texts):
        pytest.skip("this libsluice was built without nvcc")
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(texts)
    return texts


def test_Group_OnCuda_TakesOneIdThroughTheStore(fakes, tmp_path):
    texts = run_ranks(fakes, "group", str(tmp_path / "store"))
    assert all(f"rank {r} was in" in texts[r] for r in range(2))


def test_Layer_TwoProcessesOverNccl_MatchAutogradUnderEveryPolicy(fakes, tmp_path):
    messages = tmp_path / "messages"
    messages.mkdir()
    texts = run_ranks({**fakes, "SLUICE_FAKE_NCCL_FOLDER": str(messages)}, "ranks", str(tmp_path / "store"))
    assert [text.count("matches") for text in texts] == [4, 4]
    left = [path.name for path in messages.iterdir() if "-to-" in path.name]
    assert not left, "messages that nobody received"


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
