"""`sluice.optim` with its states in a file: the bits of memory, training that goes on, checkpoints both ways."""

import copy

import pytest
import sluice.optim
import torch
from sluice.errors import Busy, InvalidArgument, Mismatch
from test_optim import _backward, _model, _same, _state_bytes, _train


def _moments(optimizer):
    return [state[name] for state in optimizer.state_dict()["state"].values() for name in ("exp_avg", "exp_avg_sq")]


def test_Training_WithAFile_HasTheBitsOfMemory(tmp_path):
    models = [_model(), _model()]
    mine = sluice.optim.AdamW(models[0].parameters(), lr=1e-2, state_file=tmp_path / "states")
    plain = sluice.optim.AdamW(models[1].parameters(), lr=1e-2)
    assert _train(models[0], mine, 20) == _train(models[1], plain, 20)
    assert _same(list(models[0].parameters()), list(models[1].parameters()))
    assert _same(_moments(mine), _moments(plain))
    assert all(set(state) == {"step"} for state in mine.state.values())


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


def test_File_ThatIsThere_IsGoneOnWith(tmp_path):
    straight = _model()
    _train(straight, optimizer := sluice.optim.AdamW(straight.parameters()), 20)
    model = _model()
    first = sluice.optim.AdamW(model.parameters(), state_file=tmp_path / "states")
    _train(model, first, 10)
    with pytest.raises(Busy, match="has it open"):
        sluice.optim.AdamW(model.parameters(), state_file=tmp_path / "states")
    first._file.close()
    other = _model(seed=5)
    second = sluice.optim.AdamW(other.parameters(), state_file=tmp_path / "states")
    assert _same(list(other.parameters()), list(model.parameters()))
    _train(other, second, 10, first=10)
    assert _same(list(other.parameters()), list(straight.parameters()))
    assert _same(_moments(second), _moments(optimizer))


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


def test_Gradient_ThatIsNoNumber_ChangesNothing(tmp_path):
    model = _model()
    optimizer = sluice.optim.AdamW(model.parameters(), state_file=tmp_path / "states")
    _train(model, optimizer, 2)
    before, moments = [p.detach().clone() for p in model.parameters()], _moments(optimizer)
    model[2].bias.grad[5] = float("nan")
    with pytest.warns(UserWarning, match="the step was skipped"):
        optimizer.step()
    assert _same([p.detach() for p in model.parameters()], before) and _same(_moments(optimizer), moments)
    assert optimizer.state[model[0].weight]["step"] == 2


def test_WhatAFileCannotDo_IsRefusedByName(tmp_path):
    model = _model()
    optimizer = sluice.optim.AdamW(model.parameters(), state_file=tmp_path / "states")
    _backward(model, 0)
    model[0].bias.grad = None
    with pytest.raises(InvalidArgument, match="parameter 1 of group 0 has no gradient"):
        optimizer.step()
    with pytest.raises(InvalidArgument, match="no group is added"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    with pytest.raises(InvalidArgument, match="cannot be copied"):
        copy.deepcopy(optimizer)
    with pytest.raises(Mismatch, match="the file has 4 tensors, the optimizer has 2"):
        optimizer._file.close()
        sluice.optim.AdamW(model[0].parameters(), state_file=tmp_path / "states")
