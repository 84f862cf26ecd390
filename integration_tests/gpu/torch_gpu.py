# SPDX-License-Identifier: Apache-2.0
"""Compares the adapters on CUDA tensors with PyTorch's own autograd and with their hosts without Sluice.

    torch_gpu.py gradients | graphs | transformers | deepspeed | ranks [--fake]

graphs: torch captures a layer under a capacity, forward and backward, and launches it with other tokens and routes.
ranks: two processes, each on its own GPU, over NCCL. --fake: the same on CPU tensors. Exit 77: something is not
installed, or there is one GPU where two are needed.
"""

import datetime
import itertools
import os
import pathlib
import subprocess
import sys
import tempfile

import package

sys.path.append(str(package.ROOT / "adapters" / "torch" / "test"))  # for layer_cases
POLICIES = (("keep", "keep"), ("offload", "offload"), ("redispatch", "recompute"))
M, H, E, K = 64, 96, 8, 2


class Problem:
    """Has tokens, routes and gradients of each count of tokens, and experts. Gated ones have silu, others gelu."""

    def __init__(self, torch, device, counts, dtype, gated=True):
        torch.manual_seed(1)
        self.torch, self.gated, self.dtype, self.device = torch, gated, dtype, device

        def leaf(*shape, scale=1.0):
            return (torch.randn(*shape) * scale).to(device, dtype).requires_grad_()

        self.names = {"w1": (H, M), "w3": (H, M), "w2": (M, H)} if gated else {"w1": (H, M), "w2": (M, H)}
        self.tokens = [leaf(T, M) for T in counts]
        self.weights = [torch.rand(T, K).to(device).requires_grad_() for T in counts]
        self.ids = [self.draw_ids(T) for T in counts]
        self.params = [{n: leaf(*shape, scale=shape[1] ** -0.5) for n, shape in self.names.items()} for _ in range(E)]
        self.grads = [torch.randn(T, M).to(device, dtype) for T in counts]

    def draw_ids(self, count):
        return self.torch.stack([self.torch.randperm(E)[:K] for _ in range(count)]).to(self.device)

    def layer(self, context, **options):
        from sluice.adapters.torch import MoeConfig, MoeLayer

        sizes = {"model_width": M, "hidden_width": H, "num_experts": E, "top_k": K, "dtype": self.dtype}
        kind = {"activation": "silu" if self.gated else "gelu", "gated": self.gated}
        return MoeLayer(context, MoeConfig(**sizes, **kind, **options))

    def leaves(self, rank=0, params=None):
        """Returns what has a gradient on a rank with these experts, by default all."""
        own = self.params if params is None else params
        return [self.tokens[rank], self.weights[rank], *(p[name] for p in own for name in self.names)]

    def reference(self, tokens, ids, weights, params):
        """Computes the layer by plain GEMMs."""
        import layer_cases

        return layer_cases.reference(tokens, ids, weights, params, "silu" if self.gated else "gelu")


def report(cases):
    """Prints (name, whether it is right) of each case, and how many are. Returns the exit status."""
    count = failed = 0
    for name, is_right in cases:
        count, failed = count + 1, failed + (not is_right)
        print(f"{'ok  ' if is_right else 'FAIL'} {name}")
    print(f"{count - failed} passed, {failed} failed")
    return 1 if failed else 0


def case(torch, device, dtype, gated, policy, chunks, checkpointed):
    """Returns the largest difference of outputs and gradients to the f32 reference, relative to its largest value."""
    from sluice.adapters.torch import Context

    p = Problem(torch, device, (173,), dtype, gated)
    layer = p.layer(Context(device=device), chunks=chunks, policy=policy)

    def run(rows, route):
        return layer(rows, p.ids[0], route, p.params)

    if checkpointed:
        out = torch.utils.checkpoint.checkpoint(run, p.tokens[0], p.weights[0], use_reentrant=False)
    else:
        out = run(p.tokens[0], p.weights[0])
    got = [out, *torch.autograd.grad(out, p.leaves(), p.grads[0])]
    wide = [tensor.detach().float().requires_grad_() for tensor in p.leaves()]
    rest = iter(wide[2:])
    wide_params = [{name: next(rest) for name in p.names} for _ in range(E)]
    want_out = p.reference(wide[0], p.ids[0], wide[1], wide_params)
    want = [want_out, *torch.autograd.grad(want_out, wide, p.grads[0].float())]
    return largest_difference([t.detach().float() for t in got], [t.detach() for t in want])


def gradients(torch, device):
    torch.backends.cuda.matmul.allow_tf32 = False
    # f32: sums of some hundred terms in another order; bf16: 8 bits between the ops of both passes.
    rooms = {torch.float32: 1e-4, torch.bfloat16: 4e-2}

    def cases():
        for dtype, gated, policy, chunks in itertools.product(rooms, (False, True), POLICIES, (1, 4)):
            for checkpointed in (False, True) if chunks == 4 else (False,):
                found = case(torch, device, dtype, gated, policy, chunks, checkpointed)
                name = f"{dtype} gated {gated} {policy[0]}/{policy[1]} n {chunks} checkpointed {checkpointed}"
                yield f"{name}: {found:.2e}", found <= rooms[dtype]
        if device.type == "cuda":
            with torch.cuda.stream(torch.cuda.Stream()):
                found = case(torch, device, torch.float32, True, POLICIES[1], 4, False)
                torch.cuda.current_stream().synchronize()
            yield f"on a side stream: {found:.2e}", found <= rooms[torch.float32]

    return report(cases())


def captured(torch, step):
    """Captures `step` in a graph, after runs outside of the capture, as torch's documentation recommends."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph.replay, results


def graph_case(torch, device, policy, chunks):
    """Returns (largest difference, dropped routes)."""
    from sluice.adapters.torch import Context

    count = 128
    p, context = Problem(torch, device, (count,), torch.float32), Context(device=device)
    exact, fixed = (p.layer(context, chunks=chunks, policy=policy, capacity_rows=r) for r in (0, count // chunks))
    tokens, ids = p.tokens[0], p.ids[0]

    def step(layer):
        out = layer(tokens, ids, p.weights[0], p.params)
        return [out.detach(), *torch.autograd.grad(out, p.leaves(), p.grads[0])]

    launch, results = captured(torch, lambda: step(fixed)) if device.type == "cuda" else (None, None)
    worst = 0.0
    for _ in range(4):
        with torch.no_grad():
            ids.copy_(p.draw_ids(count))
            tokens.copy_(torch.randn(count, M))
        if launch is not None:
            launch()
        got = results if launch is not None else step(fixed)
        worst = max(worst, largest_difference(got, step(exact)))
    return worst, fixed.take_capacity_report()["num_dropped"]


def graphs(torch, device):
    """Compares graphs with eager exact exchanges on the same inputs. On a CPU the step runs instead of a graph."""
    torch.backends.cuda.matmul.allow_tf32 = False

    def cases():
        for policy, chunks in itertools.product((POLICIES[0], POLICIES[2]), (1, 4)):
            worst, dropped = graph_case(torch, device, policy, chunks)
            name = f"{policy[0]}/{policy[1]} n {chunks}: {worst:.2e}, {dropped} dropped"
            yield name, worst <= 1e-5 and dropped == 0  # the same GEMMs in f32, over more rows

    return report(cases())


def transformers(torch, device):
    try:
        import sluice.adapters.transformers  # noqa: F401
        from transformers import MixtralConfig, MixtralForCausalLM
    except ImportError as error:
        package.skip(f"transformers is not there: {error}")
    config = MixtralConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    found = {}
    for implementation in ("eager", "sluice"):
        torch.manual_seed(3)
        model = MixtralForCausalLM(config)
        model.set_experts_implementation(implementation)
        model.to(device)
        ids = torch.arange(96, device=device).view(2, 48) % 128
        loss = model(ids, labels=ids).loss
        loss.backward()
        found[implementation] = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    worst = largest_difference(found["sluice"], found["eager"])
    is_right = len(found["sluice"]) == len(found["eager"]) and worst <= 1e-3  # f32 through two layers of attention
    return report([(f"Mixtral: {len(found['sluice'])} tensors, largest difference {worst:.2e}", is_right)])


def largest_difference(got, want):
    """Returns the largest difference of two tensors, relative to the second's largest value."""
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in zip(got, want))


def deepspeed(torch, device):
    """Compares loss and gradients of DeepSpeed's layer before and after the swap, with one rank: with and without
    capacity, with fused experts and with experts that only their own module can compute."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    try:
        import deepspeed
        import sluice.adapters.deepspeed
        from deepspeed.moe.layer import MoE
    except Exception as error:  # DeepSpeed raises its own error without a CUDA toolkit
        package.skip(f"DeepSpeed is not there: {error}")
    if device.type == "cpu":
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # compiles for a minute, for inference alone
    backend = "gloo" if device.type == "cpu" else "nccl"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(dist_backend=backend, verbose=False)  # uses the existing group

    def cases():
        for k, drop, odd in ((1, True, False), (2, False, False), (1, True, True), (2, False, True)):
            models = []
            for _ in range(2):
                torch.manual_seed(1)
                middle = torch.nn.Tanh() if odd else torch.nn.ReLU()
                expert = torch.nn.Sequential(torch.nn.Linear(64, 96), middle, torch.nn.Linear(96, 64))
                made = MoE(64, expert, num_experts=4, ep_size=1, k=k, drop_tokens=drop, use_rts=False)
                models.append(made.to(device))
                models[-1].set_deepspeed_parallelism()
            handle = sluice.adapters.deepspeed.swap(models[1])
            tokens, grad = torch.randn(160, 64).to(device), torch.randn(160, 64).to(device)
            results = []
            for model in models:
                torch.manual_seed(7)  # the gate's second choice draws noise
                x = tokens.clone().requires_grad_()
                out, aux, _ = model(x)
                ((out * grad).sum() + aux).backward()
                results.append([out.detach(), x.grad, *(p.grad for p in model.parameters())])
            found = largest_difference(results[1], results[0])
            computed = handle.stats()["layers"][0]["computed_by"] if handle.layers else "nothing: no layer was swapped"
            handle.unswap()
            is_right = found <= 1e-3 and computed == ("host modules" if odd else "sluice")  # f32, sums in another order
            yield f"k {k} drop {drop}, computed by {computed}: {found:.2e}", is_right

    status = report(cases())
    torch.distributed.destroy_process_group()
    return status


def rank_case(torch, ep, device, policy, chunks, deduplicate):
    """Returns the largest difference for this rank's tokens, and its own experts, which get tokens of both ranks."""
    from sluice.adapters.torch import Context

    p, rank = Problem(torch, device, (173, 90), torch.float32), ep.rank
    layer = p.layer(Context(ep, device=device), chunks=chunks, deduplicate=deduplicate, policy=policy)
    own = p.params[E // 2 * rank : E // 2 * (rank + 1)]
    flat = p.leaves(rank, own)
    for _ in range(3):  # only the first call needs an agreement of the ranks
        out = layer(p.tokens[rank], p.ids[rank], p.weights[rank], own)
        got = [out.detach(), *torch.autograd.grad(out, flat, p.grads[rank])]
    outs = [p.reference(*each, p.params) for each in zip(p.tokens, p.ids, p.weights)]
    return largest_difference(got, [outs[rank].detach(), *torch.autograd.grad(outs, flat, p.grads)])


def one_rank(torch, device, rank, store):
    from sluice.adapters.torch import EpGroup

    torch.backends.cuda.matmul.allow_tf32 = False
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    soon = datetime.timedelta(seconds=150)
    torch.distributed.init_process_group("gloo", f"file://{store}", soon, rank=rank, world_size=2)
    ep = EpGroup.for_ranks([0, 1])

    def cases():
        for policy, chunks, deduplicate in [*itertools.product(POLICIES, (1, 4), (False,)), (POLICIES[0], 3, True)]:
            found = rank_case(torch, ep, device, policy, chunks, deduplicate)
            name = f"{policy[0]}/{policy[1]} n {chunks} deduplicated {deduplicate}"
            yield f"rank {rank}: {name}: {found:.2e}", found <= 1e-4  # as in gradients

    status = report(cases())
    torch.distributed.barrier()
    ep.close()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return status


def ranks(torch, device):
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        package.skip("one GPU here, and NCCL takes a GPU for each rank")
    fake = ["--fake"] if device.type == "cpu" else []
    with tempfile.TemporaryDirectory() as folder:
        store = str(pathlib.Path(folder) / "store")
        children = [
            subprocess.Popen([sys.executable, __file__, "rank", str(rank), store, *fake], text=True)
            for rank in range(2)
        ]
        codes = [child.wait() for child in children]
    passed = sum(code == 0 for code in codes)
    print(f"{passed} passed, {2 - passed} failed")
    return 0 if passed == 2 else 1


def main():
    where = package.ready("--fake" in sys.argv)
    import torch
    import torch.utils.checkpoint

    if sys.argv[1] == "rank":
        return one_rank(torch, where, int(sys.argv[2]), sys.argv[3])
    scripts = {"gradients": gradients, "graphs": graphs, "transformers": transformers}
    scripts |= {"deepspeed": deepspeed, "ranks": ranks}
    return scripts[sys.argv[1]](torch, where)


if __name__ == "__main__":
    sys.exit(main())
