# SPDX-License-Identifier: Apache-2.0
"""Tests layers whose saved tensors are offloaded until their backward: the bits of layers that keep them, byte counts,
errors."""

import copy
import resource
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sluice
import torch
from sluice.adapters.torch.offloaded import Offloaded
from sluice.errors import External, InvalidState
from test_pipeline_planned import Work
from test_plan_model import Model, peak_of, step
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

WIDTH, ROWS, DEPTH = 64, 256, 5  # a storage has 64 KiB or more


class Block(nn.Module):
    """Saves views of one storage, tensors that are not contiguous, random masks, and its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, ROWS * WIDTH).view(ROWS, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        mixed = torch.softmax(q @ k.t() / 8, -1) @ v
        return x + nn.functional.dropout(mixed, 0.2, self.training) * self.scale


@pytest.fixture
def blocks() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(Block() for _ in range(DEPTH))).train()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(4))


def named(model: nn.Sequential) -> dict[str, nn.Module]:
    return {f"block {i}": module for i, module in enumerate(model)}


def forward(model: nn.Module, x: torch.Tensor, seed: int = 7) -> torch.Tensor:
    torch.manual_seed(seed)
    return model(x).square().mean()


def results(model: nn.Module, x: torch.Tensor, seed: int = 7) -> list[torch.Tensor]:
    """Returns the loss and all gradients of one pass."""
    model.zero_grad(set_to_none=True)
    loss = forward(model, x, seed)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def same(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, wanted))


def saved_bytes(model: nn.Module, x: torch.Tensor) -> list[int]:
    """Returns bytes that each block saves: storages of at least 64 KiB except parameters and buffers, each once."""
    found: list[int] = []
    for block in model:
        own = {each.data_ptr() for each in (*block.parameters(), *block.buffers())}
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor, own: set[int] = own, sizes: dict[int, int] = sizes) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own and storage.nbytes() >= 65536:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            x = block(x)
        found.append(sum(sizes.values()))
    return found


@pytest.mark.parametrize("tier", ["host", "file"])
def test_Offloaded_BothTiers_SameBitsAndEachStorageOnce(blocks, x, tmp_path: Path, tier: str) -> None:
    wanted, sizes = results(copy.deepcopy(blocks), x), saved_bytes(copy.deepcopy(blocks), x)
    chosen = [0, 1, 3]
    offloaded = Offloaded(named(blocks), [f"block {i}" for i in chosen], "host" if tier == "host" else str(tmp_path))
    for _ in range(3):
        assert same(results(blocks, x), wanted)
    assert offloaded.out_bytes == [3 * sizes[i] if i in chosen else 0 for i in range(DEPTH)] and sizes[0] > 5 * 65536
    stats = offloaded.stats()
    assert stats["out_bytes"] == stats["in_bytes"] == sum(offloaded.out_bytes) and stats["held_bytes"] == 0
    assert stats["most_bytes"] == sum(sizes[i] for i in chosen)
    assert list(tmp_path.iterdir()) == []
    offloaded.undo()
    assert not any("forward" in block.__dict__ for block in blocks)
    assert same(results(blocks, x), wanted) and offloaded.stats() == stats


def test_Offloaded_ForwardsInAnyOrder_SameBits(blocks, x) -> None:
    """Tests two forwards before their backwards, in both orders; retained graphs, and graphs without a backward."""
    kept = copy.deepcopy(blocks)
    offloaded = Offloaded(named(blocks), [f"block {i}" for i in range(DEPTH)])
    wanted = [results(kept, x, seed)[1:] for seed in (1, 2)]
    for order in ((0, 1), (1, 0)):
        losses = [forward(blocks, x, seed) for seed in (1, 2)]
        for which in order:
            assert same(list(torch.autograd.grad(losses[which], blocks.parameters())), wanted[which])
    loss = forward(blocks, x, 1)
    for _ in range(2):
        assert same(list(torch.autograd.grad(loss, blocks.parameters(), retain_graph=True)), wanted[0])
    del loss, losses
    forward(blocks, x)  # nothing follows
    with torch.no_grad():
        forward(blocks, x)
    assert same(results(blocks, x, 2)[1:], wanted[1]) and same(results(copy.deepcopy(blocks), x, 2)[1:], wanted[1])
    assert same(results(blocks, x, 1)[1:], wanted[0])
    assert offloaded.stats()["held_bytes"] == 0


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Simulates a full disk: the system refuses to write past this size. Python ignores the signal for that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_Offloaded_FullDisk_NamesThePathAndTheNextBatchRuns(blocks, x, tmp_path: Path) -> None:
    wanted = results(copy.deepcopy(blocks), x)
    offloaded = Offloaded(named(blocks), [f"block {i}" for i in range(DEPTH)], str(tmp_path))
    old = forward(blocks, x)
    with largest_file(400_000), pytest.raises(External, match=f"{tmp_path}/sluice-swap-.*: File too large"):
        results(blocks, x)
    with pytest.raises(InvalidState, match="the batch of this forward of block 4 has failed"):
        old.backward()
    for _ in range(2):
        assert same(results(blocks, x), wanted)
    assert offloaded.stats()["held_bytes"] == 0


class Changes(nn.Module):
    """Changes a saved tensor in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        z = y * 2
        y.add_(1)
        return z


def test_Offloaded_SavedTensorChangedInPlace_IsRefusedByName(x) -> None:
    x.requires_grad_()
    model = nn.Sequential(Changes(), nn.Identity())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # torch's own check, without offloading
        forward(model, x).backward()
    Offloaded({"changes": model[0], "rest": model[1]}, ["changes"])
    with pytest.raises(InvalidState, match="a tensor that changes saved for its backward was changed in place"):
        forward(model, x).backward()


class Sleeping(nn.Module):
    """Takes FORWARD_S in the forward, and twice as long in the backward, for which it saves a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Work.apply(x, FORWARD_S, 2 * FORWARD_S, 4 * x.numel()) * 0.5


FORWARD_S, GAP, MOST = 0.04, 0.8, 1.05  # copies take GAP of the forward that hides them, and steps MOST of kept ones


@pytest.mark.alone
def test_Offloaded_CopiesThatTakeMostOfTheGap_StepsAsLongAsKept() -> None:
    """Takes the best of three tries. The next layer's forward hides copies out, and its backward hides copies back."""
    x, kept = torch.randn(1 << 18, requires_grad=True), nn.Sequential(*(Sleeping() for _ in range(DEPTH)))
    away = copy.deepcopy(kept)
    names = list(named(away))[:-1]
    offloaded = Offloaded(named(away), names, bytes_per_second=4 * x.numel() / (GAP * FORWARD_S))

    def seconds(model: nn.Module) -> float:
        begun = time.perf_counter()
        forward(model, x).backward()
        return time.perf_counter() - begun

    tries = []
    for _ in range(3):
        pairs = [(seconds(away), seconds(kept)) for _ in range(7)]
        tries.append(statistics.median(own / others for own, others in pairs[1:]))
    print("steps with offloaded layers over steps with kept ones:", [round(each, 3) for each in tries])
    assert offloaded.stats()["copy_ns"] > 0.9 * GAP * FORWARD_S * 1e9 * 2 * len(names) * 7 * len(tries)
    assert min(tries) <= MOST, tries


def test_PlanModel_Offload_StaysInBudgetsWithTheSameBitsAndTheBytesOfThePlan(tmp_path: Path) -> None:
    words = torch.randint(97, (8, 48), generator=torch.Generator().manual_seed(1))
    batch = {"words": words, "labels": words.roll(1, 1)}
    torch.manual_seed(5)
    model = Model().train()
    wanted = step(copy.deepcopy(model), batch)
    free = sluice.plan_model(model, "1GiB", batch, offload="host")
    assert free.offloaded == () == free.recomputed and free.offload_stats() == {} and free.copied_bytes == 0
    free.undo()
    least, most = free.recompute_bytes, free.keep_bytes
    counts = []
    for tier, share in (("host", 0.3), (str(tmp_path), 0.6), ("host", 0.8)):
        budget = int(least + (most - least) * share)
        plan = sluice.plan_model(model, budget, batch, offload=tier)
        counts.append(len(plan.offloaded))
        before = plan.offload_stats()
        assert same(step(model, batch), wanted)
        after = plan.offload_stats()
        if plan.offloaded:
            assert [after[name] - before[name] for name in ("out_bytes", "in_bytes")] == [plan.copied_bytes] * 2
            assert f"{len(plan.offloaded)} are offloaded" in str(plan)
        assert peak_of(model, batch) <= plan.bytes <= budget and plan.measured_bytes <= plan.bytes
        plan.undo()
    assert max(counts) > 0, counts
    assert not any("forward" in block.__dict__ for block in model.blocks)
