"""Run by test_cuda.py with fake CUDA libraries in the loader's path: the adapter as on a GPU, its tensors on the CPU.

torch has no CUDA here, so what the adapter asks torch for (a stream, memory of the device) comes from a stand-in; all
that it tells the library is that of a CUDA device.
"""

import sys

import torch
from sluice.adapters.torch import CallbackExperts, Context, ContextOptions, EpGroup, MoeLayer, placement
from sluice.errors import SluiceError


class Pretended(placement.CudaPlacement):
    def __init__(self, device):
        self.index, self.device = 0, torch.device("cpu")
        self.handed_out, self.kept, self.calls = [], [], 0

    def holds(self, tensor):
        return tensor.is_cpu

    def stream(self):
        self.calls += 1
        return placement.load().ffi.NULL

    def saved_bytes(self, which, size):
        self.handed_out.append((which, size))
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def keep(self, buffers):
        self.kept.append([which for which in (3, 4) if which < len(buffers) and buffers[which].numel() > 0])


def pretend():
    import sluice.adapters.torch.context as module

    module.placement_of = lambda device: Pretended(device) if str(device).startswith("cuda") else placement.Placement()


def reference(tokens, ids, weights, params):
    out = torch.zeros_like(tokens)
    for e, p in enumerate(params):
        for k in range(ids.shape[1]):
            rows = (ids[:, k] == e).nonzero()[:, 0]
            hidden = torch.nn.functional.silu(tokens[rows] @ p["w1"].T) * (tokens[rows] @ p["w3"].T)
            out = out.index_add(0, rows, weights[rows, k : k + 1] * (hidden @ p["w2"].T))
    return out


def layer_matches_autograd():
    for policy in (("keep", "keep"), ("offload", "offload"), ("redispatch", "recompute")):
        torch.manual_seed(0)
        context = Context(device="cuda:0")
        layer = MoeLayer(
            context,
            model_width=16,
            hidden_width=24,
            num_experts=4,
            top_k=2,
            activation="silu",
            gated=True,
            num_chunks=2,
            restore_input=policy[0],
            restore_middle=policy[1],
        )
        tokens = torch.randn(10, 16, requires_grad=True)
        ids = torch.stack([torch.randperm(4)[:2] for _ in range(10)])
        weights = torch.rand(10, 2, requires_grad=True)
        shapes = {"w1": (24, 16), "w3": (24, 16), "w2": (16, 24)}
        params = [{n: torch.randn(s, requires_grad=True) for n, s in shapes.items()} for _ in range(4)]
        flat = [tokens, weights, *(p[n] for p in params for n in shapes)]
        grad = torch.randn(10, 16)
        out = layer(tokens, ids, weights, params)
        got = torch.autograd.grad(out, flat, grad)
        want_out = reference(tokens, ids, weights, params)
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


def deepspeed_matches_stock():
    """A DeepSpeed layer whose experts are "on CUDA": the same loss and gradients as stock, through a CUDA context."""
    import os

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # compiles for a minute, for inference alone
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)  # takes the group that is there
    import sluice.adapters.deepspeed.probe as probe
    from deepspeed.moe.layer import MoE
    from sluice.adapters.deepspeed import swap
    from sluice.adapters.deepspeed.unsupported import UnsupportedError

    probe.device_of_experts = lambda tensor: torch.device("cuda", 0)
    for k, drop in ((1, True), (2, False)):
        models = []
        for _ in range(2):
            torch.manual_seed(1)
            expert = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.ReLU(), torch.nn.Linear(24, 16))
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
        gemms = {backend.stats()["gemm"] for backend in handle._backends.values()}
        assert all(gemm.startswith("cublas") for gemm in gemms) and len(gemms) == 1, gemms
        handle.unswap()
        print(f"k {k} matches stock")
    odd = MoE(16, torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()), num_experts=2, ep_size=1)
    odd.set_deepspeed_parallelism()
    try:
        swap(odd)
    except UnsupportedError as error:
        print(f"refused: {error}")
    else:
        raise AssertionError("modules on CUDA were not refused")
    torch.distributed.destroy_process_group()


def refusals():
    context = Context(device="cuda:0")
    options = {"model_width": 4, "hidden_width": 4, "num_experts": 1, "top_k": 1}
    layer = MoeLayer(context, **options)
    rows, ids, weights = torch.zeros(2, 4), torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1)
    params = [{"w1": torch.zeros(4, 4), "w2": torch.zeros(4, 4)}]
    cases = [
        lambda: layer(rows.to("meta"), ids, weights, params),
        lambda: layer(rows, ids, weights, [{"w1": torch.zeros(4, 4, device="meta"), "w2": params[0]["w2"]}]),
        lambda: MoeLayer(context, experts=CallbackExperts([torch.nn.Linear(4, 4)]), **options),
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


def group(rank, store):
    """The id of one rank reaches the other, and both make their communicator from it."""
    import datetime

    torch.distributed.init_process_group(
        "gloo", f"file://{store}", datetime.timedelta(seconds=150), rank=rank, world_size=2
    )
    ep = EpGroup.for_ranks([0, 1])
    where = Pretended("cuda")
    first, again = ep.comm_on(where), ep.comm_on(where)
    lib, ffi = placement.load().lib, placement.load().ffi
    assert first == again != ep.comm
    assert ffi.string(lib.sluice_comm_name(first)) == b"nccl"
    assert (lib.sluice_comm_rank(first), lib.sluice_comm_world_size(first)) == (rank, 2)
    key = ep._joined.meeting.read("NCCL 0 id")
    assert len(key) == 128 and any(key)
    torch.distributed.barrier()
    ep.close()
    torch.distributed.barrier()
    print(f"rank {rank} was in")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    pretend()
    if sys.argv[1] == "group":
        group(int(sys.argv[2]), sys.argv[3])
    else:
        {"layer": layer_matches_autograd, "refusals": refusals, "deepspeed": deepspeed_matches_stock}[sys.argv[1]]()
