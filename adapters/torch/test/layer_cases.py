# SPDX-License-Identifier: Apache-2.0
"""Inputs of layers for W ranks, and the results of a plain loop over experts in double precision."""

import contextlib
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sluice.adapters.torch import EpGroup, MoeConfig, MoeLayer
from sluice.errors import PeerRefused

M, H = 12, 20
ACTIVATIONS = {
    "identity": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def world():
    return dist.get_world_size(), dist.get_rank()


def group():
    return EpGroup.for_ranks(list(range(dist.get_world_size())))


@contextlib.contextmanager
def raises(kind, text="", peer=None):
    """Checks the kind, the text and the peer of an error. PeerRefused is not taken for its base classes."""
    try:
        yield
    except kind as error:
        assert isinstance(error, PeerRefused) == (kind is PeerRefused), error
        assert text in str(error) and peer in (None, getattr(error, "peer", None)), error
    else:
        raise AssertionError(f"no {kind.__name__} with {text!r}")


def expert_forward(x, p, activation):
    pre = x @ p["w1"].t() + (p["b1"] if "b1" in p else 0)
    mid = ACTIVATIONS[activation](pre)
    if "w3" in p:
        mid = mid * (x @ p["w3"].t() + (p["b3"] if "b3" in p else 0))
    return mid @ p["w2"].t() + (p["b2"] if "b2" in p else 0)


def reference(tokens, ids, weights, params, activation):
    """Returns one rank's output, computed for each route separately and summed in k order."""
    out = torch.zeros_like(tokens)
    for k in range(ids.shape[1]):
        for e in range(len(params)):
            rows = (ids[:, k] == e).nonzero(as_tuple=True)[0]
            if len(rows):
                part = expert_forward(tokens[rows], params[e], activation) * weights[rows, k : k + 1]
                out = out.index_add(0, rows, part)
    return out


class Case:
    """Inputs of all ranks, the same on every rank because they come from one seed."""

    def __init__(
        self,
        W,
        per_rank=2,
        K=2,
        tokens=(9,),
        gated=False,
        bias=False,
        n=1,
        dtype=torch.float32,
        activation="gelu",
        hot=None,
        drop=0.0,
        idle=(),
        ids_dtype=torch.int64,
        strides="plain",
        wgrad="deferred",
        restore=("keep", "keep"),
        deduplicate=False,
        reuse=False,
        widths=(M, H),
        seed=0,
    ):
        generator = torch.Generator().manual_seed(1000 + seed)
        M, H = self.widths = widths

        def rand(*shape, scale=1.0):
            return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

        self.E, self.K, self.W, self.n = W * per_rank, K, W, n
        self.gated, self.bias, self.dtype, self.activation, self.wgrad = gated, bias, dtype, activation, wgrad
        self.strides, self.per_rank, self.restore, self.deduplicate = strides, per_rank, restore, deduplicate
        self.reuse = reuse
        names = {"w1": (H, M), "w2": (M, H)}
        if gated:
            names["w3"] = (H, M)
        if bias:
            names.update(b1=(H,), b2=(M,))
        if gated and bias:
            names["b3"] = (H,)
        self.params = [
            {name: rand(*shape, scale=1 / math.sqrt(shape[-1])) for name, shape in names.items()} for _ in range(self.E)
        ]
        self.tokens, self.ids, self.weights, self.cotangents = [], [], [], []
        allowed = [e for e in range(self.E) if e not in idle]
        for r in range(W):
            T = tokens[r % len(tokens)]
            self.tokens.append(rand(T, M))
            self.weights.append(torch.rand(T, K, generator=generator))
            ids = torch.empty(T, K, dtype=torch.int64)
            for t in range(T):
                order = torch.randperm(len(allowed), generator=generator)[:K]
                ids[t] = torch.tensor([allowed[i] for i in order])
            if hot is not None:
                ids[:, 0] = hot
            ids[torch.rand(T, K, generator=generator) < drop] = -1
            self.ids.append(ids.to(ids_dtype))
            self.cotangents.append(rand(T, M))

    def expected(self, rank):
        """Returns the output and all gradients of `rank`, in double."""
        params = [{k: v.double().requires_grad_() for k, v in p.items()} for p in self.params]
        tokens = [t.double().requires_grad_() for t in self.tokens]
        weights = [w.double().requires_grad_() for w in self.weights]
        outs = [reference(t, i, w, params, self.activation) for t, i, w in zip(tokens, self.ids, weights)]
        total = sum((o * c.double()).sum() for o, c in zip(outs, self.cotangents))
        if total.requires_grad:
            total.backward()
        mine = params[rank * self.per_rank : (rank + 1) * self.per_rank]

        def grad(t):
            return torch.zeros_like(t) if t.grad is None else t.grad

        return (
            outs[rank].detach(),
            grad(tokens[rank]),
            grad(weights[rank]),
            [{k: grad(v) for k, v in p.items()} for p in mine],
        )

    def laid_out(self, tensor):
        """Returns the same values with other strides."""
        tensor = tensor.clone()
        if self.strides == "transposed" and tensor.dim() == 2:
            return tensor.t().contiguous().t()
        if self.strides == "padded" and tensor.dim() == 2:
            wide = torch.full((tensor.shape[0], tensor.shape[1] + 3), float("nan"), dtype=tensor.dtype)
            wide[:, : tensor.shape[1]] = tensor
            return wide[:, : tensor.shape[1]]
        return tensor

    def layer(self, context, experts=None, **options):
        options.setdefault("chunks", self.n)
        return MoeLayer(
            context,
            MoeConfig(
                model_width=self.widths[0],
                hidden_width=self.widths[1],
                num_experts=self.E,
                top_k=self.K,
                dtype=self.dtype,
                activation=self.activation,
                gated=self.gated,
                bias=self.bias,
                wgrad_mode=self.wgrad,
                deduplicate=self.deduplicate,
                reuse=self.reuse,
                **options,
                policy=self.restore,
            ),
            experts,
        )

    def inputs(self, rank):
        """Returns new leaves: tokens, ids, weights, params of `rank`."""
        tokens = self.tokens[rank].clone().requires_grad_()
        weights = self.weights[rank].clone().requires_grad_()
        ids = self.ids[rank].clone()
        if self.strides != "plain":
            ids = ids.t().contiguous().t()
        mine = self.params[rank * self.per_rank : (rank + 1) * self.per_rank]
        params = [{k: self.laid_out(v).requires_grad_() for k, v in p.items()} for p in mine]
        return tokens, ids, weights, params

    def check(self, layer, rank, passes=1):
        """Compares the results of `rank` after forwards and backwards of a layer, whose gradients add up."""
        tokens, ids, weights, params = self.inputs(rank)
        for _ in range(passes):
            out = layer(tokens, ids, weights, params)
            out.backward(self.cotangents[rank])
        compare(self, rank, out, tokens, weights, params, passes)

    def tolerance(self):
        return {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}[self.dtype]


def close(name, got, want, tolerance):
    assert got is not None, f"{name}: no gradient"
    assert got.shape == want.shape, f"{name}: {got.shape} is not {want.shape}"
    if want.numel() == 0:
        return
    error = (got.double() - want).abs().max().item()
    scale = max(1.0, want.abs().max().item())
    assert error <= tolerance * scale, f"{name}: off by {error:.3g}, allowed {tolerance * scale:.3g}"


def compare(case, rank, out, tokens, weights, params, times=1):
    want_out, want_tokens, want_weights, want_params = case.expected(rank)
    tolerance = case.tolerance()
    close("output", out.detach(), want_out, tolerance)
    close("tokens.grad", tokens.grad, times * want_tokens, tolerance)
    close("weights.grad", weights.grad, times * want_weights, max(4 * tolerance, 1e-6))  # f32 whatever the dtype
    for index, (mine, want) in enumerate(zip(params, want_params)):
        for name, tensor in mine.items():
            close(f"expert {index} {name}.grad", tensor.grad, times * want[name], 4 * tolerance)
