# SPDX-License-Identifier: Apache-2.0
"""Jobs of test_cuda.py: the adapter runs as on a GPU, with fake CUDA libraries and with tensors on the CPU.

torch has no CUDA here, so a stand-in provides torch's stream and device memory. The adapter passes the library the same
arguments as for a CUDA device.
"""

import contextlib
import ctypes
import datetime
import sys

import torch
from layer_cases import reference
from sluice.adapters.torch import (
    CallbackExperts,
    Context,
    ContextOptions,
    EpGroup,
    MoeConfig,
    MoeLayer,
    dlpack,
    placement,
)
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
        return dlpack.borrow(place, rows, width, dtype, dlpack.CPU, 0)

    def guard(self):
        self.guarded += 1
        return contextlib.nullcontext()


def pretend():
    import sluice.adapters.torch.context as module

    module.placement_of = lambda device: Pretended(device) if str(device).startswith("cuda") else placement.Placement()


def _gated(**more):
    widths = {"model_width": 16, "hidden_width": 24, "num_experts": 4, "top_k": 2}
    return MoeConfig(**widths, activation="silu", gated=True, **more)


def layer_matches_autograd():
    for policy in (("keep", "keep"), ("offload", "offload"), ("redispatch", "recompute")):
        torch.manual_seed(0)
        context = Context(device="cuda:0")
        layer = MoeLayer(context, _gated(chunks=2, policy=policy))
        tokens = torch.randn(10, 16, requires_grad=True)
        ids = torch.stack([torch.randperm(4)[:2] for _ in range(10)])
        weights = torch.rand(10, 2, requires_grad=True)
        shapes = {"w1": (24, 16), "w3": (24, 16), "w2": (16, 24)}
        params = [{n: torch.randn(s, requires_grad=True) for n, s in shapes.items()} for _ in range(4)]
        flat = [tokens, weights, *(p[n] for p in params for n in shapes)]
        grad = torch.randn(10, 16)
        out = layer(tokens, ids, weights, params)
        got = torch.autograd.grad(out, flat, grad)
        want_out = reference(tokens, ids, weights, params, "silu")
        want = torch.autograd.grad(want_out, flat, grad)
        for a, b in zip((out, *got), (want_out, *want)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert context.stats()["gemm"].startswith("cublas"), context.stats()["gemm"]
        where = context.placement
        sizes = dict(where.handed_out)
        offloaded = [which for which in (3, 4) if sizes.get(which, 0) > 0]
        assert offloaded == ([3, 4] if policy[0] == "offload" else []), where.handed_out
        assert where.kept == [offloaded, offloaded]  # after forward and after backward
        assert where.calls == 2  # both passes were given the host's stream
        print(policy, "matches", [which for which in sizes if sizes[which] > 0])


def profile_by_the_devices_name():
    """Predictions while training, by the profile of the driver's name of the GPU; an unknown name is refused."""
    torch.manual_seed(0)
    sizes = {"model_width": 16, "hidden_width": 24, "num_experts": 4, "top_k": 2, "activation": "relu"}
    tuner = TunerOptions(mode="model", machine="device")
    Pretended.device_name = "NVIDIA Made-Up 9000"
    try:
        MoeLayer(Context(device="cuda:0", options=ContextOptions(tuner=tuner)), MoeConfig(**sizes))
    except SluiceError as error:
        print("refused:", error)
    Pretended.device_name = "NVIDIA A100-SXM4-40GB"
    context = Context(device="cuda:0", options=ContextOptions(tuner=tuner))
    layer = MoeLayer(context, MoeConfig(**sizes, reuse=True))
    params = [{"w1": torch.randn(24, 16), "w2": torch.randn(16, 24)} for _ in range(4)]
    for p in params:
        for one in p.values():
            one.requires_grad_()
    for _ in range(4):
        tokens = torch.randn(10, 16, requires_grad=True)
        ids = torch.stack([torch.randperm(4)[:2] for _ in range(10)])
        layer(tokens, ids, torch.rand(10, 2), params).sum().backward()
    last = context.decisions()[-1]
    assert last["why"] == "predicted" and last["predicted_seconds"] > 0, last
    print("predicted", last["num_chunks"], last["restore_input"], last["restore_pre_activation"])


class Odd(torch.nn.Module):
    """An expert that Sluice cannot compute by itself: a residual, a norm, and a parameter without rows."""

    def __init__(self):
        super().__init__()
        self.up, self.norm = torch.nn.Linear(16, 16), torch.nn.LayerNorm(16)
        self.unused = torch.nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x + torch.tanh(self.norm(self.up(x)))


def modules_match_autograd():
    """Tests experts that are the host's modules: values, gradients, idle experts, n, no_grad, dtypes, exceptions."""
    f32, f64, bf16, f16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
    for n, dtype, tolerance in ((1, f32, 1e-5), (3, f64, 1e-5), (2, bf16, 3e-2), (2, f16, 3e-2)):
        torch.manual_seed(3)
        context = Context(device="cuda:0")
        experts = [Odd().to(dtype) for _ in range(4)]
        layer = MoeLayer(
            context,
            MoeConfig(model_width=16, num_experts=4, top_k=2, dtype=dtype, chunks=n),
            experts=CallbackExperts(experts, view=lambda rows: rows.view(1, *rows.shape)),
        )
        tokens = torch.randn(12, 16).to(dtype).requires_grad_()
        ids = torch.stack([torch.randperm(3)[:2] for _ in range(12)])  # the last expert has no rows
        ids[:9, 0], ids[:9, 1] = 1, 0  # and two have most
        weights = torch.rand(12, 2, requires_grad=True)
        flat = [tokens, weights, *(p for expert in experts for p in expert.parameters())]
        grad = torch.randn(12, 16).to(dtype)

        def by_autograd(tokens=tokens, ids=ids, weights=weights, experts=experts):
            out = torch.zeros(tokens.shape)
            for e, expert in enumerate(experts):
                for k in range(2):
                    rows = (ids[:, k] == e).nonzero()[:, 0]
                    out = out.index_add(0, rows, weights[rows, k : k + 1] * expert(tokens[rows]).float())
            return out.to(tokens.dtype)

        want_out = by_autograd()
        want = torch.autograd.grad(want_out, flat, grad, allow_unused=True)
        out = layer(tokens, ids, weights)
        got = torch.autograd.grad(out, flat, grad, retain_graph=True)
        again = torch.autograd.grad(out, flat, grad)  # through the retained graphs
        for a, b, c in zip((out, *got), (want_out, *want), (out, *again)):
            torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=tolerance, atol=tolerance)
            assert torch.equal(a, c)
        assert all(not p.any() for p in got[-5:]), "the idle expert's gradients are zeros"
        with torch.no_grad():
            assert torch.equal(layer(tokens, ids, weights), out)
        where = context.placement
        assert where.borrowed > 0 and where.guarded >= 3 * n and where.calls == 4, vars(where)

        for in_backward in (False, True):
            raising = experts[0].register_forward_hook(_raise_later if in_backward else _raise)
            reached = False
            try:
                out = layer(tokens, ids, weights)
                reached = True
                out.sum().backward()
            except SluiceError as error:
                assert isinstance(error.__cause__, KeyError) and reached == in_backward, error.__cause__
            else:
                raise AssertionError("was not raised")
            raising.remove()
            out = layer(tokens, ids, weights)
            for a, b in zip(torch.autograd.grad(out, flat, grad), got):
                assert torch.equal(a, b)  # as if nothing had happened
        print(n, dtype, "matches")


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        return rows.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyError("no such thing")


def _raise_later(module, args, out):
    return _Raises.apply(out)


def _raise(module, args, out):
    raise KeyError("no such thing")


def deepspeed_matches_stock():
    """Tests loss and gradients of a DeepSpeed layer with experts "on CUDA", through a CUDA context, against stock."""
    import os

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # slow to compile, only for inference
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
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
        stock, ours = models
        handle = swap(ours)
        assert len(handle.layers) == 1
        tokens, grad = torch.randn(40, 16), torch.randn(40, 16)
        results = []
        for model in (stock, ours):
            torch.manual_seed(7)  # the gate's second choice draws noise
            x = tokens.clone().requires_grad_()
            out, aux, _ = model(x)
            ((out * grad).sum() + aux).backward()
            results.append([out.detach(), x.grad, *(p.grad for p in model.parameters())])
        for a, b in zip(*results):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        gemms = {backend.stats()["gemm"] for backend in handle.backends.values()}
        assert all(gemm.startswith("cublas") for gemm in gemms) and len(gemms) == 1, gemms
        computed = [found["computed_by"] for found in handle.stats()["layers"]]
        handle.unswap()
        print(f"k {k} matches stock, computed by {', '.join(computed)}")
    torch.distributed.destroy_process_group()


def expert_parallel_matches_stock(store):
    """Tests `ep_implementation="sluice"` on one rank with experts "on CUDA": fused, and transformers' own functions as
    callbacks, on the rows of one expert at a time."""
    import sluice.adapters.transformers.experts as module
    from sluice.adapters.transformers.transport import SluiceEP
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.models.mixtral import MixtralConfig, modeling_mixtral

    torch.distributed.init_process_group("gloo", f"file://{store}", rank=0, world_size=1)
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
        print(implementation, "matches stock, computed by", found["computed_by"])
    torch.distributed.destroy_process_group()


def refusal_goes_where_the_others_wait():
    """A rank whose first call cannot be made reports it on the device of its experts, with the peers' communicator."""
    import types

    import sluice.adapters.transformers.experts as module

    class Asked(Exception):
        pass

    def context_of(options, group, layers=None, device=None):
        raise Asked(str(device))

    module.context_of = context_of
    state = module.ExpertsState(0, types.SimpleNamespace(world_size=2, ranks=(0, 1)))
    state._options = ContextOptions()
    try:
        state._refuse(ValueError("no"), torch.device("cuda", 0))
    except Asked as asked:
        print("asked for", asked)


def refusals():
    context = Context(device="cuda:0")
    options = {"model_width": 4, "hidden_width": 4, "num_experts": 1, "top_k": 1}
    layer = MoeLayer(context, MoeConfig(**options))
    rows, ids, weights = torch.zeros(2, 4), torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1)
    params = [{"w1": torch.zeros(4, 4), "w2": torch.zeros(4, 4)}]
    cases = [
        lambda: layer(rows.to("meta"), ids, weights, params),
        lambda: layer(rows, ids, weights, [{"w1": torch.zeros(4, 4, device="meta"), "w2": params[0]["w2"]}]),
        lambda: Context(options=ContextOptions(gemm="native"), device="cuda:0"),
    ]
    for case in cases:
        try:
            case()
        except SluiceError as error:
            print(f"refused: {error}")
        else:
            raise AssertionError("was not refused")
    layer(rows, ids, weights, params)  # and it works on


def capacities_have_the_bits_of_exact():
    """Tests graph mode under torch, on both devices: outputs and gradients, changing routes, dropped routes."""
    for device in ("cpu", "cuda:0"):
        torch.manual_seed(0)
        context = Context(device=device)
        sizes = {"model_width": 16, "hidden_width": 24, "num_experts": 4, "top_k": 2, "chunks": 2}
        sizes |= {"activation": "silu", "gated": True, "policy": ("keep", "keep")}
        layers = [MoeLayer(context, MoeConfig(**sizes, capacity_rows=rows)) for rows in (0, 6, 1)]
        exact, roomy, tight = layers
        tokens = torch.randn(12, 16, requires_grad=True)  # 6 in each chunk
        weights = torch.rand(12, 2, requires_grad=True)
        names = {"w1": (24, 16), "w3": (24, 16), "w2": (16, 24)}
        params = [{n: (torch.randn(s) * s[1] ** -0.5).requires_grad_() for n, s in names.items()} for _ in range(4)]
        flat = [tokens, weights, *(p[n] for p in params for n in names)]
        grad = torch.randn(12, 16)
        for _ in range(3):
            ids = torch.stack([torch.randperm(4)[:2] for _ in range(12)])
            results = []
            for layer in (exact, roomy):
                out = layer(tokens, ids, weights, params)
                results.append([out, *torch.autograd.grad(out, flat, grad)])
            for a, b in zip(*results):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)  # rows of zeros between the others
        report = roomy.take_capacity_report()
        assert (report["num_forwards"], report["num_routes"], report["num_dropped"]) == (3, 72, 0), report
        assert roomy.take_capacity_report()["num_forwards"] == 0
        out = tight(tokens, ids, weights, params)
        report = tight.take_capacity_report()
        counts = [chunk.flatten().bincount(minlength=4) for chunk in ids.split(6)]
        assert report["num_dropped"] == sum(int((c - 1).clamp(min=0).sum()) for c in counts) > 0, report
        assert report["most_rows"] == max(int(c.max()) for c in counts), report
        try:
            exact.take_capacity_report()
        except SluiceError as error:
            print(f"{device} matches; without a capacity: {error}")


def ranks_match_autograd(rank, store):
    """Two processes with a device each, over a fake NCCL that passes messages by files: outputs and gradients of this
    rank's tokens and of its experts, which computed the tokens of both."""
    limit = datetime.timedelta(seconds=150)
    torch.distributed.init_process_group("gloo", f"file://{store}", limit, rank=rank, world_size=2)
    ep = EpGroup.for_ranks([0, 1])
    names = {"w1": (24, 16), "w3": (24, 16), "w2": (16, 24)}
    cases = [
        (("keep", "keep"), 1, False),
        (("offload", "offload"), 3, False),
        (("redispatch", "recompute"), 2, True),
        (("keep", "keep"), 0, False),  # n by Sluice
    ]
    for policy, chunks, deduplicate in cases:
        torch.manual_seed(0)
        context = Context(ep, device="cuda:0")
        layer = MoeLayer(context, _gated(chunks=chunks, deduplicate=deduplicate, policy=policy))
        counts = [40, 23]
        tokens = [torch.randn(T, 16, requires_grad=True) for T in counts]
        ids = [torch.stack([torch.randperm(4)[:2] for _ in range(T)]) for T in counts]
        weights = [torch.rand(T, 2, requires_grad=True) for T in counts]
        grads = [torch.randn(T, 16) for T in counts]
        params = [{n: (torch.randn(s) * s[1] ** -0.5).requires_grad_() for n, s in names.items()} for _ in range(4)]
        own = params[2 * rank : 2 * rank + 2]
        flat = [tokens[rank], weights[rank], *(p[n] for p in own for n in names)]
        for _ in range(3):  # the second and third pass exchange without the agreement of the first
            out = layer(tokens[rank], ids[rank], weights[rank], own)
            got = torch.autograd.grad(out, flat, grads[rank])
            context.placement.settle()
        want_out = [reference(*each, params, "silu") for each in zip(tokens, ids, weights)]
        want = torch.autograd.grad(want_out, flat, grads)
        for a, b in zip((out, *got), (want_out[rank], *want)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        sent = context.stats()["bytes_sent"]
        assert sent > 0, context.stats()
        print(f"rank {rank}: {policy} n {chunks} matches, {sent} bytes sent")
    torch.distributed.barrier()
    ep.close()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    pretend()
    if sys.argv[1] == "ranks":
        ranks_match_autograd(int(sys.argv[2]), sys.argv[3])
    else:
        {
            "layer": layer_matches_autograd,
            "modules": modules_match_autograd,
            "profile": profile_by_the_devices_name,
            "capacities": capacities_have_the_bits_of_exact,
            "refusals": refusals,
            "deepspeed": deepspeed_matches_stock,
            "expert_parallel": expert_parallel_matches_stock,
            "refusal": refusal_goes_where_the_others_wait,
        }[sys.argv[1]](*sys.argv[2:])
