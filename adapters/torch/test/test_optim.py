# SPDX-License-Identifier: Apache-2.0
"""Compares `sluice.optim` with `torch.optim`: errors, states that convert both ways, steps that change nothing. With
its states in a file: the bits of states in memory, resuming, checkpoints both ways.

Rows of integration_tests/pairs compare losses and parameters of trainings, test_ends_of_range.py single steps.
"""

import copy

import pytest
import sluice.optim
import torch
from sluice.errors import Busy, InvalidArgument, Mismatch, NotFound


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


# ---- states in a file ----


def _moments(optimizer):
    return [state[name] for state in optimizer.state_dict()["state"].values() for name in ("exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_HalfParameters_AreTheirMastersRounded(tmp_path, dtype):
    model = _model(dtype)
    masters = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
    mine = sluice.optim.AdamW(model.parameters(), lr=1e-2, state_file=tmp_path / "states")
    wide = sluice.optim.AdamW(masters, lr=1e-2)
    for step in range(10):
        mine.zero_grad()
        _backward(model, step)
        for master, p in zip(masters, model.parameters()):
            master.grad = p.grad.float()
        mine.step()
        wide.step()
        assert all(torch.equal(p, master.to(dtype)) for p, master in zip(model.parameters(), masters))
    saved = mine.state_dict()["state"]
    assert _same([saved[index]["master"] for index in range(len(masters))], [m.detach() for m in masters])


def _named(path, model, **options):
    return sluice.optim.AdamW(model.parameters(), state_file=path, **options)


def test_File_ThatIsThere_IsGoneOnWithWhereThatIsAskedFor(tmp_path):
    straight = _model()
    _train(straight, optimizer := sluice.optim.AdamW(straight.parameters()), 20)
    model = _model()
    first = _named(tmp_path / "states", model, resume=True, durable=True)  # none is there yet
    _train(model, first, 10)
    with pytest.raises(Busy, match="has it open"):
        _named(tmp_path / "states", model, resume=True)
    first._file.close()
    other = _model(seed=5)
    before = [p.detach().clone() for p in other.parameters()]
    with pytest.raises(InvalidArgument, match="exists: resume=True continues its steps"):
        _named(tmp_path / "states", other)
    assert _same([p.detach() for p in other.parameters()], before)
    second = _named(tmp_path / "states", other, resume=True)
    assert _same(list(other.parameters()), list(model.parameters()))
    _train(other, second, 10, first=10)
    assert _same(list(other.parameters()), list(straight.parameters()))
    assert _same(_moments(second), _moments(optimizer))


def test_Step_OfTheTwoInAFile_CanBeChosen(tmp_path):
    model, wanted = _model(), _model()
    _train(model, first := _named(tmp_path / "states", model), 5)
    _train(wanted, sluice.optim.AdamW(wanted.parameters()), 4)
    first._file.close()
    with pytest.raises(NotFound, match="does not have step 3"):
        _named(tmp_path / "states", model, resume=True, step=3)
    with pytest.raises(NotFound, match="there is no file"):
        _named(tmp_path / "none", model, resume=True, step=4)
    with pytest.raises(InvalidArgument, match="pass resume=True"):
        _named(tmp_path / "states", model, step=4)
    with pytest.raises(InvalidArgument, match="need a state_file"):
        sluice.optim.AdamW(model.parameters(), durable=True)
    second = _named(tmp_path / "states", model, resume=True, step=4)
    assert second.state[model[0].weight]["step"] == 4
    assert _same(list(model.parameters()), list(wanted.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_StateDict_OfParametersThatOtherCodeWrote_ChangesNoneAndHasTheirMasters(tmp_path, dtype):
    model = _model(dtype)
    _train(model, optimizer := _named(tmp_path / "states", model), 2)
    with torch.no_grad():
        model[0].weight.fill_(5.0)
    before = [p.detach().clone() for p in model.parameters()]
    saved = optimizer.state_dict()["state"]
    assert _same([p.detach() for p in model.parameters()], before)
    if dtype == torch.bfloat16:
        assert torch.equal(saved[0]["master"], torch.full((53, 37), 5.0))
        assert torch.equal(saved[2]["master"].to(dtype), model[2].weight.detach())


def test_LoadStateDict_ThatFails_LeavesTheOptimizerAsItWas(tmp_path):
    straight, model = _model(), _model()
    _train(straight, plain := sluice.optim.AdamW(straight.parameters(), lr=1e-3), 4)
    _train(model, optimizer := _named(tmp_path / "states", model), 2)
    saved = plain.state_dict()
    (tmp_path / "states.unfinished").write_text("a letter")
    with pytest.raises(sluice.errors.External, match="exists and is not a state file"):
        optimizer.load_state_dict(copy.deepcopy(saved))
    (tmp_path / "states.unfinished").unlink()
    odd = copy.deepcopy(saved)
    odd["state"][1]["step"] = torch.tensor(9.0)
    odd["param_groups"][0]["lr"] = 7.0
    with pytest.raises(InvalidArgument, match="all parameters are at one step"):
        optimizer.load_state_dict(odd)
    assert optimizer.param_groups[0]["lr"] == 1e-3 and all(set(state) == {"step"} for state in optimizer.state.values())
    wanted = _model()
    _train(wanted, kept := sluice.optim.AdamW(wanted.parameters()), 4)
    _train(model, optimizer, 2, first=2)
    assert _same(list(model.parameters()), list(wanted.parameters())) and _same(_moments(optimizer), _moments(kept))


def test_LoadStateDict_OverALinkAndALeftover_WritesWhereTheLinkLeads(tmp_path):
    model = _model()
    (tmp_path / "disk").mkdir()
    (tmp_path / "states").symlink_to(tmp_path / "disk" / "states")
    optimizer = _named(tmp_path / "states", model)
    _train(model, optimizer, 3)
    (tmp_path / "disk" / "states.unfinished").touch()  # as after a kill
    optimizer.load_state_dict(optimizer.state_dict())
    assert (tmp_path / "states").is_symlink()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["states"]
    _train(model, optimizer, 1, first=3)
    optimizer._file.close()
    assert _named(tmp_path / "states", model, resume=True)._file.step == 4


@pytest.mark.parametrize("kind", [torch.optim.AdamW, sluice.optim.AdamW])
def test_StateDict_ToAndFromMemory_TrainingGoesOn(tmp_path, kind):
    straight, model = _model(), _model()
    _train(straight, plain := kind(straight.parameters(), lr=1e-2), 20)
    saved, weights = copy.deepcopy(plain.state_dict()), copy.deepcopy(straight.state_dict())
    model.load_state_dict(weights)
    filed = sluice.optim.AdamW(model.parameters(), state_file=tmp_path / "states")
    filed.load_state_dict(saved)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["states"]
    back = kind(straight.parameters(), lr=9.0)
    back.load_state_dict(copy.deepcopy(filed.state_dict()))
    assert _same(_state_bytes(straight, back), _state_bytes(straight, plain))
    _train(straight, back, 5, first=20)
    _train(model, filed, 5, first=20)
    for a, b in zip(model.parameters(), straight.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert filed.state[model[0].weight]["step"] == 25


def test_WhatAFileCannotDo_IsRefusedByName(tmp_path):
    model = _model()
    optimizer = sluice.optim.AdamW(model.parameters(), state_file=tmp_path / "states")
    _backward(model, 0)
    model[0].bias.grad = None
    with pytest.raises(InvalidArgument, match="parameter 1 of group 0 has no gradient"):
        optimizer.step()
    with pytest.raises(InvalidArgument, match="groups cannot be added"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    with pytest.raises(InvalidArgument, match="cannot be copied"):
        copy.deepcopy(optimizer)
    with pytest.raises(Mismatch, match="the file has 4 tensors, the optimizer has 2"):
        optimizer._file.close()
        sluice.optim.AdamW(model[0].parameters(), state_file=tmp_path / "states", resume=True)
