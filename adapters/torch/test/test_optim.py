# SPDX-License-Identifier: Apache-2.0
"""Compares `sluice.optim` with `torch.optim`: the same training, states that convert both ways, steps that change
nothing."""

import copy

import pytest
import sluice.optim
import torch
from sluice.errors import InvalidArgument

PAIRS = [(sluice.optim.AdamW, torch.optim.AdamW), (sluice.optim.Adam, torch.optim.Adam)]


def _model(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(37, 53), torch.nn.GELU(), torch.nn.Linear(53, 11)).to(dtype)


def _backward(model, step):
    generator = torch.Generator().manual_seed(step)
    dtype = next(model.parameters()).dtype
    x = torch.randn(16, 37, generator=generator).to(dtype)
    y = torch.randn(16, 11, generator=generator).to(dtype)
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss


def _train(model, optimizer, steps, first=0):
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        losses.append(_backward(model, step).item())
        optimizer.step()
    return losses


def _state_bytes(model, optimizer):
    tensors = [p.detach() for p in model.parameters()]
    for p in model.parameters():
        tensors += [value for _, value in sorted(optimizer.state[p].items())]
    return [tensor.clone() for tensor in tensors]


def _same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("ours, theirs", PAIRS)
@pytest.mark.parametrize(
    "options",
    [{}, {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}, {"maximize": True, "lr": 1e-5}],
    ids=["defaults", "numbers", "maximize"],
)
def test_Training_AgainstTorch_HasItsLossesAndParameters(ours, theirs, options):
    ours_model, theirs_model = _model(), _model()
    mine = _train(ours_model, ours(ours_model.parameters(), **options), 50)
    stock = _train(theirs_model, theirs(theirs_model.parameters(), **options), 50)
    torch.testing.assert_close(mine, stock, rtol=2e-6, atol=0)
    for a, b in zip(ours_model.parameters(), theirs_model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)  # different rounding, over 50 steps


def _errors(make, steps=20, count=20_000):
    """Returns root mean square errors of p, m and v against f64, after a training with gradients of all sizes."""
    ends = []
    for make_one, dtype in ((make, torch.float32), (torch.optim.AdamW, torch.float64)):
        generator = torch.Generator().manual_seed(3)
        param = torch.nn.Parameter(torch.randn(count, generator=generator).to(dtype))
        optimizer = make_one([param], lr=1e-3, weight_decay=0.1)
        for _ in range(steps):
            sizes = 10 ** (torch.rand(count, generator=generator) * 4 - 3)
            param.grad = (torch.randn(count, generator=generator) * sizes).to(dtype)
            optimizer.step()
        state = optimizer.state[param]
        ends.append([each.detach().double() for each in (param, state["exp_avg"], state["exp_avg_sq"])])
    return [float((a - b).square().mean().sqrt()) for a, b in zip(*ends, strict=True)]


def _exact(*args, **numbers):
    return sluice.optim.AdamW(*args, exact=True, **numbers)


def test_Errors_AgainstF64_AreTorchsAndLessWhereExact():
    """1 % is allowed for different rounding of single elements."""
    rounded, exact = _errors(sluice.optim.AdamW), _errors(_exact)
    stock = _errors(lambda *args, **numbers: torch.optim.AdamW(*args, fused=True, **numbers))
    assert all(ours <= 1.01 * theirs for ours, theirs in zip(rounded, stock, strict=True)), (rounded, stock)
    assert exact[0] < 0.7 * rounded[0] and exact[2] < 0.7 * rounded[2], (exact, rounded)


def test_Exact_CopiedOrPickled_StaysExact():
    model = _model()
    optimizer = copy.deepcopy(_exact(model.parameters()))
    assert optimizer.exact and not copy.deepcopy(sluice.optim.AdamW(model.parameters())).exact


def test_Resume_AtFifty_IsByteIdenticalAtAHundred(tmp_path):
    straight = _model()
    _train(straight, optimizer := sluice.optim.AdamW(straight.parameters()), 100)
    wanted = _state_bytes(straight, optimizer)
    model = _model()
    _train(model, optimizer := sluice.optim.AdamW(model.parameters()), 50)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "fifty.pt")
    saved = torch.load(tmp_path / "fifty.pt")
    model = _model(seed=9)
    optimizer = sluice.optim.AdamW(model.parameters(), lr=9.0)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    _train(model, optimizer, 50, first=50)
    assert _same(_state_bytes(model, optimizer), wanted)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_Gradient_ThatIsNoNumber_ChangesNothingAndIsTold(bad):
    model = _model()
    optimizer = sluice.optim.AdamW(model.parameters())
    _train(model, optimizer, 3)
    before = _state_bytes(model, optimizer)
    optimizer.zero_grad()
    _backward(model, 3)
    model[2].bias.grad[5] = bad
    with pytest.warns(UserWarning, match="the step was skipped"):
        optimizer.step()
    assert _same(_state_bytes(model, optimizer), before)
    assert optimizer.skipped_steps == 1
    _train(model, optimizer, 1, first=4)
    assert not _same(_state_bytes(model, optimizer), before)


def test_CheckFinite_TurnedOff_HasTheSameBitsAndLooksAtNothing():
    models = [_model(), _model()]
    optimizers = [
        sluice.optim.AdamW(m.parameters(), check_finite=on) for m, on in zip(models, (True, False), strict=True)
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        _train(model, optimizer, 3)
    assert _same(*(_state_bytes(*pair) for pair in zip(models, optimizers, strict=True)))
    moved = copy.deepcopy(optimizers[1])
    assert moved.check_finite is False
    models[1][2].bias.grad[0] = float("nan")
    optimizers[1].step()
    assert optimizers[1].skipped_steps == 0
    assert models[1][2].bias[0].isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_HalfParameters_KeepMomentsInF32_AlsoWhenLoaded(dtype):
    model = _model(dtype)
    optimizer = sluice.optim.AdamW(model.parameters())
    _train(model, optimizer, 5)
    fresh = sluice.optim.AdamW(model.parameters())
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p in model.parameters():
        for name in ("exp_avg", "exp_avg_sq"):
            assert fresh.state[p][name].dtype == torch.float32
            assert torch.equal(fresh.state[p][name], optimizer.state[p][name])


def test_Tensors_ThatAreNotDense_AreUpdatedWhereTheyLie():
    """Tests a transposed tensor, a column of a larger tensor, and a gradient that is expanded from one number."""
    results = []
    for kind in (sluice.optim.AdamW, torch.optim.AdamW):
        torch.manual_seed(3)
        base = torch.randn(9, 14)
        transposed = torch.nn.Parameter(torch.randn(5, 7).t())
        column = base[:, ::2].requires_grad_()
        scalar = torch.nn.Parameter(torch.tensor(0.5))
        optimizer = kind([transposed, column, scalar], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (transposed.sum() * 2 + (column**2).sum() + scalar * 3).backward()
            optimizer.step()
        results.append([transposed.detach(), base, scalar.detach()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_Closure_HooksAndSchedulers_AreTorchs():
    model = _model()
    optimizer = sluice.optim.AdamW(model.parameters(), lr=1e-2)
    assert isinstance(optimizer, torch.optim.AdamW)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def closure():
        calls.append("closure")
        optimizer.zero_grad()
        return _backward(model, 0)

    loss = optimizer.step(closure)
    scheduler.step()
    assert calls == ["pre", "closure", "post"]
    assert loss.item() > 0
    assert optimizer.param_groups[0]["lr"] == 5e-3


@pytest.mark.parametrize("name", ["amsgrad", "capturable", "differentiable"])
def test_Option_ThatIsNotThere_IsRefusedByName(name):
    with pytest.raises(InvalidArgument, match=name):
        sluice.optim.AdamW(_model().parameters(), **{name: True})


def test_Parameters_ThatItCannotUpdate_AreRefusedAndNothingIsChanged():
    model = _model()
    wide = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = sluice.optim.AdamW([*model.parameters(), wide])
    before = [p.detach().clone() for p in model.parameters()]
    _backward(model, 0)
    wide.grad = torch.ones_like(wide)
    with pytest.raises(InvalidArgument, match="float64"):
        optimizer.step()
    assert _same([p.detach() for p in model.parameters()], before)
