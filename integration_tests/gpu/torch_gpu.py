"""The torch adapter and the transformers adapter on CUDA tensors, against PyTorch's own autograd.

    torch_gpu.py gradients | transformers [--fake]

--fake: the same on CPU tensors. Exit 77: something is not installed.
"""

import itertools
import sys

import package


def reference(torch, tokens, ids, weights, params, gated):
    """The layer by plain products."""
    act = torch.nn.functional.silu if gated else torch.nn.functional.gelu
    out = torch.zeros_like(tokens)
    for e, p in enumerate(params):
        for k in range(ids.shape[1]):
            rows = (ids[:, k] == e).nonzero()[:, 0]
            hidden = act(tokens[rows] @ p["w1"].T)
            if gated:
                hidden = hidden * (tokens[rows] @ p["w3"].T)
            out = out.index_add(0, rows, weights[rows, k : k + 1].to(out.dtype) * (hidden @ p["w2"].T))
    return out


def case(torch, device, dtype, gated, policy, chunks, checkpointed):
    """The largest difference of outputs and gradients to the f32 reference's, relative to their largest value."""
    from sluice.adapters.torch import Context, MoeLayer

    torch.manual_seed(1)
    T, M, H, E, K = 173, 64, 96, 8, 2
    layer = MoeLayer(
        Context(device=device),
        model_width=M,
        hidden_width=H,
        num_experts=E,
        top_k=K,
        dtype=dtype,
        activation="silu" if gated else "gelu",
        gated=gated,
        num_chunks=chunks,
        restore_input=policy[0],
        restore_middle=policy[1],
    )
    names = {"w1": (H, M), "w3": (H, M), "w2": (M, H)} if gated else {"w1": (H, M), "w2": (M, H)}

    def leaf(*shape, scale=1.0, kind=dtype):
        return (torch.randn(*shape) * scale).to(device, kind).requires_grad_()

    tokens, weights = leaf(T, M), torch.rand(T, K).to(device).requires_grad_()
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).to(device)
    params = [{name: leaf(*shape, scale=shape[1] ** -0.5) for name, shape in names.items()} for _ in range(E)]
    flat = [tokens, weights, *(p[name] for p in params for name in names)]
    grad = torch.randn(T, M).to(device, dtype)

    def run(rows, route):
        return layer(rows, ids, route, params)

    if checkpointed:
        out = torch.utils.checkpoint.checkpoint(run, tokens, weights, use_reentrant=False)
    else:
        out = run(tokens, weights)
    got = [out, *torch.autograd.grad(out, flat, grad)]
    wide = [tensor.detach().float().requires_grad_() for tensor in flat]
    rest = iter(wide[2:])
    wide_params = [{name: next(rest) for name in names} for _ in range(E)]
    want_out = reference(torch, wide[0], ids, wide[1], wide_params, gated)
    want = [want_out, *torch.autograd.grad(want_out, wide, grad.float())]
    got, want = [t.detach() for t in got], [t.detach() for t in want]
    return max(float((a.float() - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in zip(got, want))


def gradients(torch, device):
    torch.backends.cuda.matmul.allow_tf32 = False
    policies = [("keep", "keep"), ("offload", "offload"), ("redispatch", "recompute")]
    # f32: sums of some hundred terms in another order; bf16: 8 bits between the ops of both passes.
    rooms = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
    failed = count = 0
    for dtype, gated, policy, chunks in itertools.product(rooms, (False, True), policies, (1, 4)):
        for checkpointed in (False, True) if chunks == 4 else (False,):
            found = case(torch, device, dtype, gated, policy, chunks, checkpointed)
            name = f"{dtype} gated {gated} {policy[0]}/{policy[1]} n {chunks} checkpointed {checkpointed}"
            count, failed = count + 1, failed + (not found <= rooms[dtype])
            print(f"{'ok  ' if found <= rooms[dtype] else 'FAIL'} {name}: {found:.2e}")
    if device.type == "cuda":
        with torch.cuda.stream(torch.cuda.Stream()):
            found = case(torch, device, torch.float32, True, policies[1], 4, False)
            torch.cuda.current_stream().synchronize()
        count, failed = count + 1, failed + (not found <= rooms[torch.float32])
        print(f"{'ok  ' if found <= rooms[torch.float32] else 'FAIL'} on a side stream: {found:.2e}")
    print(f"{count - failed} passed, {failed} failed")
    return 1 if failed else 0


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
    worst = max(
        float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in zip(found["sluice"], found["eager"])
    )
    is_right = len(found["sluice"]) == len(found["eager"]) and worst <= 1e-3  # f32 through two layers of attention
    print(f"Mixtral: {len(found['sluice'])} tensors, largest difference {worst:.2e}")
    print("1 passed, 0 failed" if is_right else "0 passed, 1 failed")
    return 0 if is_right else 1


def main():
    where = package.ready("--fake" in sys.argv)
    import torch
    import torch.utils.checkpoint

    return {"gradients": gradients, "transformers": transformers}[sys.argv[1]](torch, where)


if __name__ == "__main__":
    sys.exit(main())
