# SPDX-License-Identifier: Apache-2.0
"""Jobs of test_cuda.py: the adapter runs as on a GPU, with fake CUDA libraries and with tensors on the CPU.

torch has no CUDA here, so a stand-in provides torch's stream and device memory. The adapter passes the library the same
arguments as for a CUDA device.
"""

import contextlib
import ctypes
import os
import sys
import types

import pytest
import sluice.adapters.torch.context
import torch
import torch.distributed as dist
from autograd_jobs import callback_experts
from layer_cases import Case, compare, group, world
from sluice.adapters.torch import Context, ContextOptions, placement
from sluice.config import TunerOptions
from sluice.errors import SluiceError


class Pretended(placement.CudaPlacement):
    def __init__(self, device):
        self.index, self.device = 0, torch.device("cpu")
        self.handed_out, self.held, self.kept, self.calls = [], [], [], 0
        self.borrowed, self.guarded = 0, 0

    device_name = ""

    def name(self):
        return self.device_name

    def holds(self, tensor):
        return tensor.is_cpu

    def stream(self):
        self.calls += 1
        return placement.load().ffi.NULL

    def saved_bytes(self, which, size):
        self.handed_out.append((which, size))
        self.held.append(torch.empty(size, dtype=torch.uint8, device="cpu"))
        return self.held[-1]

    def settle(self):
        """Waits until the stream is idle, since ranks in other processes may be late. Until then tensors are held, as
        torch's device memory would be."""
        assert ctypes.CDLL("libcuda.so.1").cuStreamSynchronize(None) == 0
        self.held.clear()

    def keep(self, buffers):
        self.kept.append([which for which in (3, 4) if which < len(buffers) and buffers[which].numel() > 0])

    def borrow(self, address, rows, width, dtype):
        self.borrowed += 1
        place = int(placement.load().ffi.cast("uintptr_t", address))
        return placement.borrow(place, rows, width, dtype, placement.CPU, 0)

    def guard(self):
        self.guarded += 1
        return contextlib.nullcontext()


def _placement_of(device):
    return Pretended(device) if str(device).startswith("cuda") else placement.Placement()


sluice.adapters.torch.context.placement_of = _placement_of

POLICIES = (("keep", "keep"), ("offload", "offload"), ("redispatch", "recompute"))


def _case(W=1, per_rank=4, **options):
    return Case(W, per_rank=per_rank, gated=True, activation="silu", **options)


def layers():
    """Outputs and gradients under each policy; the host's stream and memory."""
    for policy in POLICIES:
        case, context = _case(n=2, tokens=(10,), restore=policy), Context(device="cuda:0")
        case.check(case.layer(context), 0)
        assert context.stats()["gemm"].startswith("cublas"), context.stats()["gemm"]
        where = context.placement
        sizes = dict(where.handed_out)
        offloaded = [which for which in (3, 4) if sizes.get(which, 0) > 0]
        assert offloaded == ([3, 4] if policy[0] == "offload" else []), where.handed_out
        assert where.kept == [offloaded, offloaded]  # after forward and after backward
        assert where.calls == 2  # both passes were given the host's stream


def profile_by_the_devices_name():
    """Predictions while training, by the profile of the driver's name of the GPU; an unknown name is refused."""
    options = ContextOptions(tuner=TunerOptions(mode="model", machine="device"))
    case = Case(1, per_rank=4, tokens=(10,), activation="relu", n=0, reuse=True,
                restore=("adaptive", "adaptive"), wgrad="adaptive")  # fmt: skip
    Pretended.device_name = "NVIDIA Made-Up 9000"
    words = "no profile is of a NVIDIA Made-Up 9000; there are those of A100, H200, V100"
    with pytest.raises(SluiceError, match=words):
        case.layer(Context(device="cuda:0", options=options))
    Pretended.device_name = "NVIDIA A100-SXM4-40GB"
    context = Context(device="cuda:0", options=options)
    layer = case.layer(context)
    for _ in range(4):
        case.check(layer, 0)
    last = context.decisions()[-1]
    assert last["why"] == "predicted" and last["predicted_seconds"] > 0, last


def modules():
    where = callback_experts("cuda:0")
    assert where.borrowed > 0 and where.guarded > 0, vars(where)


def deepspeed_layers():
    """Tests loss and gradients of a DeepSpeed layer with experts "on CUDA", through a CUDA context, against stock."""
    os.environ["LOCAL_RANK"] = "0"
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # slow to compile, only for inference
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)  # uses the existing group
    import sluice.adapters.deepspeed.moe.probe as probe
    from deepspeed.moe.layer import MoE
    from sluice.adapters.deepspeed import swap

    probe.device_of_experts = lambda tensor: torch.device("cuda", 0)
    for k, drop, odd in ((1, True, False), (2, False, False), (1, True, True), (2, False, True)):
        models = []
        for _ in range(2):
            torch.manual_seed(1)
            fused = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.ReLU(), torch.nn.Linear(24, 16))
            expert = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()) if odd else fused
            models.append(MoE(16, expert, num_experts=4, ep_size=1, k=k, drop_tokens=drop, use_rts=False))
            models[-1].set_deepspeed_parallelism()
        handle = swap(models[1])
        tokens, grad = torch.randn(40, 16), torch.randn(40, 16)
        results = []
        for model in models:
            torch.manual_seed(7)  # the gate's second choice draws noise
            x = tokens.clone().requires_grad_()
            out, aux, _ = model(x)
            ((out * grad).sum() + aux).backward()
            results.append([out.detach(), x.grad, *(p.grad for p in model.parameters())])
        for a, b in zip(*results):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        gemms = {backend.stats()["gemm"] for backend in handle.backends.values()}
        assert all(gemm.startswith("cublas") for gemm in gemms) and len(gemms) == 1, gemms
        (found,) = handle.stats()["layers"]
        assert found["computed_by"] == ("host modules" if odd else "sluice"), found
        handle.unswap()


def expert_parallel():
    """Tests `ep_implementation="sluice"` on one rank with experts "on CUDA": fused, and transformers' own functions as
    callbacks, on the rows of one expert at a time."""
    import sluice.adapters.transformers.experts as module
    from sluice.adapters.transformers.transport import SluiceEP
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.models.mixtral import MixtralConfig, modeling_mixtral

    mesh = init_device_mesh("cpu", (1,))
    original = module.context_of
    module.context_of = lambda options, group, layers, device: original(options, group, layers, torch.device("cuda", 0))
    config = MixtralConfig(hidden_size=16, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2)
    rows = torch.Generator().manual_seed(1)
    for implementation in ("sluice", "eager", "grouped_mm"):
        results = []
        for parallel in (False, True):
            torch.manual_seed(3)
            config._experts_implementation = implementation if parallel else "eager"
            experts = modeling_mixtral.MixtralExperts(config)
            for parameter in experts.parameters():
                torch.nn.init.normal_(parameter, std=0.2)
            call = SluiceEP(experts, mesh, mesh) if parallel else experts
            rows.manual_seed(1)
            x = torch.randn(9, 16, generator=rows, requires_grad=True)
            ids = torch.randint(0, 4, (9, 2), generator=rows)
            weights = torch.rand(9, 2, generator=rows, requires_grad=True)
            out = call(x, ids, weights)
            out.square().sum().backward()
            results.append([out.detach(), x.grad, weights.grad, *(p.grad for p in experts.parameters())])
        for a, b in zip(*results):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        found, context = call._state.stats(), call._state.contexts()[0].stats()
        assert found["computed_by"] == ("sluice" if implementation == "sluice" else "the module's own functions"), found
        assert context["gemm"].startswith("cublas"), context["gemm"]


def first_call_refused():
    """A rank whose first call cannot be made reports it on the device of its experts, with the peers' communicator."""
    import sluice.adapters.transformers.experts as module

    class Asked(Exception):
        pass

    def context_of(options, group, layers=None, device=None):
        raise Asked(str(device))

    module.context_of = context_of
    state = module.ExpertsState(0, types.SimpleNamespace(world_size=2, ranks=(0, 1)))
    state._options = ContextOptions()
    with pytest.raises(Asked, match="cuda:0"):
        state._refuse(ValueError("no"), torch.device("cuda", 0))


def refusals():
    """Tensors elsewhere, and what is not there, are refused by name, and the layer works on."""
    case = Case(1, tokens=(2,))
    layer = case.layer(Context(device="cuda:0"))
    tokens, ids, weights, params = case.inputs(0)
    elsewhere = [{**params[0], "w1": params[0]["w1"].to("meta")}, params[1]]
    for call, words in (
        (lambda: layer(tokens.to("meta"), ids, weights, params), r"tokens is on meta.*\.to\("),
        (lambda: layer(tokens, ids, weights, elsewhere), r"w1 of local expert 0 is on meta.*\.to\("),
        (lambda: Context(options=ContextOptions(gemm="native"), device="cuda:0"), '(?=.*"native").*cublas'),
    ):
        with pytest.raises(SluiceError, match=words):
            call()
    case.check(layer, 0)


def capacities():
    """Layers of fixed capacity, on both devices: values under changing routes, and the count of dropped routes."""
    for device in ("cpu", "cuda:0"):
        context = Context(device=device)
        cases = [_case(n=2, tokens=(12,), seed=seed) for seed in range(3)]  # 6 tokens in each chunk
        exact, roomy, tight = (cases[0].layer(context, capacity_rows=rows) for rows in (0, 6, 1))
        for case in cases:
            case.check(roomy, 0)
        report = roomy.take_capacity_report()
        assert (report["num_forwards"], report["num_routes"], report["num_dropped"]) == (3, 72, 0), report
        assert roomy.take_capacity_report()["num_forwards"] == 0
        tight(*cases[0].inputs(0))
        report = tight.take_capacity_report()
        counts = [chunk.flatten().bincount(minlength=4) for chunk in cases[0].ids[0].split(6)]
        assert report["num_dropped"] == sum(int((c - 1).clamp(min=0).sum()) for c in counts) > 0, report
        assert report["most_rows"] == max(int(c.max()) for c in counts), report
        with pytest.raises(SluiceError):
            exact.take_capacity_report()


def over_nccl(folder):
    """Two processes with a device each, over a fake NCCL that passes messages by files: outputs and gradients of this
    rank's tokens and of its experts, which computed the tokens of both."""
    os.environ["SLUICE_FAKE_NCCL_FOLDER"] = folder
    W, rank = world()
    for policy, n, deduplicate in (*zip(POLICIES, (1, 3, 2), (False, False, True)), (POLICIES[0], 0, False)):
        case = _case(W, per_rank=2, n=n, tokens=(40, 23), restore=policy, deduplicate=deduplicate)
        context = Context(group(), device="cuda:0")
        layer = case.layer(context)
        for _ in range(3):  # the second and third pass exchange without the agreement of the first
            tokens, ids, weights, params = case.inputs(rank)
            flat = [tokens, weights, *(tensor for expert in params for tensor in expert.values())]
            out = layer(tokens, ids, weights, params)
            grads = torch.autograd.grad(out, flat, case.cotangents[rank])
            context.placement.settle()
            for leaf, grad in zip(flat, grads):
                leaf.grad = grad
            compare(case, rank, out, tokens, weights, params)
        assert context.stats()["bytes_sent"] > 0, context.stats()
    dist.barrier()
    group().close()
    dist.barrier()
