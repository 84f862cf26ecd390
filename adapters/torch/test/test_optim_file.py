# SPDX-License-Identifier: Apache-2.0
"""Tests `sluice.optim` with its states in a file: the bits of states in memory, resuming, checkpoints both ways."""

import copy

import pytest
import sluice.optim
import torch
from sluice.errors import Busy, InvalidArgument, Mismatch, NotFound
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
