# SPDX-License-Identifier: Apache-2.0
"""Tests `sluice.plan_model`: activations stay within a budget, with the same bits of losses and gradients."""

import copy
import os

import pytest
import ranks
import sluice
import torch
from sluice.adapters.torch import memory_meter
from sluice.errors import Busy, External, InvalidArgument, InvalidState, OverBudget, Unsupported
from sluice.layer_lookup import layers
from torch import nn
from torch.profiler import ProfilerActivity, profile

BATCH, LENGTH, WIDTH, WORDS, DEPTH = 2, 48, 64, 97, 6


class Block(nn.Module):
    """Attention and MLP with dropout, which must draw the same numbers again."""

    def __init__(self, hidden: int = 4 * WIDTH) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        y = nn.functional.dropout(nn.functional.gelu(self.up(self.second(x))), 0.1, self.training)
        return x + self.down(y)


class Model(nn.Module):
    """Blocks differ in width, so that some save more bytes per second than others."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH * (2 + 2 * (i % 3))) for i in range(DEPTH))
        self.norm = nn.BatchNorm1d(WIDTH)  # has buffers that a forward changes
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    words = torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"words": words, "labels": words.roll(1, 1)}


@pytest.fixture
def model() -> Model:
    torch.manual_seed(5)
    return Model().train()


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Returns the loss and all gradients of a pass with dropout of one seed."""
    torch.manual_seed(11)
    model.zero_grad(set_to_none=False)
    loss = model(**batch)["loss"]
    loss.backward()
    return [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]


def peak_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Returns the peak by all events of torch's allocator, without the meter's marks. Gradients exist before."""
    step(model, batch)  # allocates gradients
    torch.manual_seed(11)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model(**batch)["loss"].backward()
    live = most = 0
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


def test_PlanModel_TenBudgets_AreKeptWithTheSameBits(model, batch) -> None:
    wanted = step(copy.deepcopy(model), batch)
    plan = sluice.plan_model(model, "1GiB", batch)
    assert plan.recomputed == () and plan.measured_bytes == pytest.approx(plan.keep_bytes, rel=0.02)
    most, least = plan.keep_bytes, plan.recompute_bytes
    assert least < 0.6 * most
    counts = []
    plan.undo()
    for i in range(10):
        budget = least + (most - least) * (i + 1) // 10
        plan = sluice.plan_model(model, budget, batch)
        counts.append(len(plan.recomputed))
        assert peak_of(model, batch) <= plan.bytes <= budget and plan.measured_bytes <= plan.bytes
        for got, want in zip(step(model, batch), wanted):
            assert torch.equal(got, want)
        plan.undo()
    assert counts[0] >= DEPTH - 1 and counts[-1] <= 1 and len(set(counts)) >= 3, counts
    assert peak_of(model, batch) > most * 0.95


def test_PlanModel_TooLittle_NamesTheSmallestBudgetAndChangesNothing(model, batch) -> None:
    with pytest.raises(OverBudget, match="over the budget of 1000: give at least") as caught:
        sluice.plan_model(model, 1000, batch)
    assert not any("forward" in block.__dict__ for block in model.blocks)
    smallest = int(str(caught.value).split("give at least ")[1].split(",")[0])
    plan = sluice.plan_model(model, smallest, batch)
    assert plan.recomputed and peak_of(model, batch) <= smallest
    plan.undo()
    with pytest.raises(OverBudget):
        sluice.plan_model(model, plan.recompute_bytes // 2, batch)


def test_PlanModel_Measuring_LeavesBuffersGradientsAndRandomNumbers(model, batch) -> None:
    step(model, batch)
    before = [p.grad for p in model.parameters()], [p.grad.clone() for p in model.parameters()]
    buffers, state = [b.clone() for b in model.buffers()], torch.get_rng_state()
    sluice.plan_model(model, "1GiB", batch)
    for parameter, same, value in zip(model.parameters(), *before):
        assert parameter.grad is same and torch.equal(parameter.grad, value)
    assert all(torch.equal(got, want) for got, want in zip(model.buffers(), buffers)) and buffers
    assert torch.equal(torch.get_rng_state(), state)
    model.zero_grad(set_to_none=True)
    sluice.plan_model(model, "1GiB", batch).undo()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_PlanModel_Report_SaysWhatWasChosenAndWhy(model, batch) -> None:
    free = sluice.plan_model(model, "1GiB", batch)
    free.undo()
    plan = sluice.plan_model(model, (free.keep_bytes + free.recompute_bytes) // 2, batch)
    assert [block.name for block in plan.blocks] == [f"blocks.{i}" for i in range(DEPTH)]
    assert 0 < len(plan.recomputed) < DEPTH and plan.extra_seconds > 0
    lines = str(plan).splitlines()
    assert lines[0].startswith(f"{len(plan.recomputed)} of {DEPTH} blocks are recomputed: ")
    for line, block in zip(lines[1:], plan.blocks):
        assert block.name in line and block.policy in line
        assert ("over its budget; this costs" in line) == (block.policy == "recompute")
    for block in plan.blocks:
        assert ("forward" in model.get_submodule(block.name).__dict__) == (block.policy == "recompute")
    with pytest.raises(InvalidState, match="is recomputed already"):
        sluice.plan_model(model, "1GiB", batch)
    loaded = copy.deepcopy(model)  # an enabled option belongs to the instance, and in a copy to the copy
    assert all(torch.equal(a, b) for a, b in zip(step(loaded, batch), step(model, batch)))
    plan.undo()
    plan.undo()
    assert not any("forward" in block.__dict__ for block in model.blocks)
    with torch.no_grad():
        model.eval()(**batch)


def test_PlanModel_HostLayers_AreSwitchedByInstance(batch) -> None:
    transformers = pytest.importorskip("transformers", reason="./test installs it")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=WORDS, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config).train()
    given = {"input_ids": batch["words"], "labels": batch["labels"]}
    wanted = step(copy.deepcopy(model), given)
    free = sluice.plan_model(model, "1GiB", given)
    free.undo()
    budget = (free.keep_bytes + free.recompute_bytes) // 2
    plan = sluice.plan_model(model, budget, given)
    layers = model.model.layers
    assert [block.name for block in plan.blocks] == [f"model.layers.{i}" for i in range(4)]
    assert [bool(layer.gradient_checkpointing) for layer in layers] == [b.policy == "recompute" for b in plan.blocks]
    assert 0 < len(plan.recomputed) < 4 and peak_of(model, given) <= budget
    assert all(torch.equal(got, want) for got, want in zip(step(model, given), wanted))
    plan.undo()
    assert not any(layer.gradient_checkpointing for layer in layers)


class Two(nn.Module):
    """Calls a block as often as configured."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.blocks = times, nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        for _ in range(self.times):
            x = self.blocks[1](x)
        return x.square().sum()


def test_PlanModel_WhatIsNotThere_IsRefusedByName(model, batch) -> None:
    def refused(error: type[Exception], text: str, *args: object, **options: object) -> None:
        with pytest.raises(error, match=text):
            sluice.plan_model(*args, **options)

    x = torch.ones(2, 8)
    refused(External, "/no/folder/sluice-swap-.*: No such file", model, "1GiB", batch, offload="/no/folder")
    refused(InvalidArgument, "budget is 'lots'", model, "lots", batch)
    refused(InvalidArgument, "budget is 0", model, 0, batch)
    refused(InvalidState, "eval mode", Two(1).eval(), "1MiB", x)
    refused(InvalidArgument, "has no list of modules of one class", nn.Linear(8, 8), "1MiB", x)
    refused(InvalidArgument, "the loss is a tensor of shape", nn.Sequential(*Two(1).blocks), "1MiB", x)
    refused(InvalidState, r"block blocks.1 ran 2 times", Two(2), "1MiB", x)
    refused(InvalidState, r"block blocks.1 ran 0 times", Two(0), "1MiB", x)
    refused(InvalidArgument, "of blocks is not a module of the model", Two(1), "1MiB", x, blocks=[nn.Linear(8, 8)])
    both = Two(1)
    refused(InvalidArgument, "lies in block blocks", both, "1MiB", x, blocks=[both.blocks, both.blocks[0]])
    hooked = Two(1)
    hooked.blocks[0].weight.register_post_accumulate_grad_hook(lambda _: None)
    refused(Unsupported, "blocks.0.weight has a hook", hooked, "1MiB", x)
    frozen = Two(1)
    frozen.requires_grad_(False)
    refused(InvalidArgument, "no parameter of the model needs a gradient", frozen, "1MiB", x)
    given = sluice.plan_model(nn.Sequential(*Two(1).blocks), "1MiB", (x,), loss=lambda y: y.sum())
    assert given.recomputed == ()


def test_Meter_AllocatesAndFrees_AreSeenBetweenMarks() -> None:
    def run() -> None:
        kept = torch.empty(1000, dtype=torch.uint8)
        memory_meter.mark("one")
        gone = torch.empty(5000, dtype=torch.uint8)
        del gone
        memory_meter.mark("two")
        del kept

    made = memory_meter.measure(run)
    assert (made.live("one"), made.live("two"), made.live("end")) == (1000, 1000, 0)
    assert (made.peak("start", "one"), made.peak("one", "two"), made.peak("two", "end")) == (1000, 6000, 1000)
    assert "one" in made and "three" not in made


def test_Meter_WritesNothingAndPassesOnWhatOthersWrite(capfd) -> None:
    memory_meter.measure(lambda: torch.ones(3))
    assert capfd.readouterr().err == ""
    with memory_meter._without_notes():
        os.write(2, b"USDT: profiler_start\nmine\n")
    assert capfd.readouterr().err == "mine\n"


def test_Meter_WhileAProfilerRuns_IsRefusedAndRunsAfterwards() -> None:
    with profile(activities=[ProfilerActivity.CPU]), pytest.raises(Busy, match="a torch profiler is running already"):
        memory_meter.measure(lambda: None)
    with pytest.raises(ZeroDivisionError):
        memory_meter.measure(lambda: 1 // 0)
    assert memory_meter.measure(lambda: None).peak("start", "end") == 0


@pytest.fixture
def qwen3_moe(batch):
    """Returns a model whose experts run on Sluice, and its inputs."""
    transformers = pytest.importorskip("transformers", reason="./test installs it")
    config = transformers.Qwen3MoeConfig(
        hidden_size=64, intermediate_size=128, moe_intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=4, vocab_size=WORDS, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="sluice").train()
    words = batch["words"].repeat(2, 2)
    return model, {"input_ids": words, "labels": words}


def contexts_peak(model: nn.Module, given: dict[str, torch.Tensor]) -> int:
    """Returns the peak of the model's own contexts. Other tests of the process may have left contexts."""
    contexts = {id(one): one for layer in layers(model) for one in layer.contexts()}.values()
    for context in contexts:
        context.stats(reset_peak=True)
    step(model, given)
    return sum(context.stats()["peak_bytes"] for context in contexts)


def test_PlanModel_MoeLayersOfSluice_StayWithTorchInTenBudgets(qwen3_moe) -> None:
    model, given = qwen3_moe
    wanted = step(model, given)
    free = sluice.plan_model(model, "1GiB", given)
    assert free.recomputed == () and len({block.moe for block in free.blocks}) == 1
    free.undo()
    assert contexts_peak(model, given) > 0.2 * free.keep_bytes  # Sluice's bytes matter
    with pytest.raises(OverBudget) as caught:
        sluice.plan_model(model, 1, given)
    first = int(str(caught.value).split("give at least ")[1].split(",")[0])
    used = set()
    for i in range(10):
        budget = first + (free.bytes - first) * i // 9
        plan = sluice.plan_model(model, budget, given)
        peaks = peak_of(model, given), contexts_peak(model, given)
        assert sum(peaks) <= plan.bytes and plan.measured_bytes <= plan.bytes <= budget
        assert sum(peaks) <= plan.measured_bytes * 1.25  # the tuner's n may be another one since
        used |= {(block.policy, block.moe) for block in plan.blocks}
        for got, want in zip(step(model, given), wanted):  # n differs, and with it the order of sums
            assert torch.allclose(got, want, rtol=1e-4, atol=1e-5)
        plan.undo()
    assert len({policy for policy, _ in used}) == 2 and len({moe for _, moe in used}) >= 2, used
    assert contexts_peak(model, given) + peak_of(model, given) > 0.8 * free.keep_bytes


def test_PlanModel_ContextWithABudgetOfItsOwn_IsRefused(qwen3_moe) -> None:
    model, given = qwen3_moe
    sluice.configure(memory_budget="64MiB")
    try:
        with pytest.raises(Unsupported, match='has a "memory_budget" of its own'):
            sluice.plan_model(model, "1GiB", given)
    finally:
        sluice.configure()


def test_PlanModel_ExpertsSharedAmongRanks_GetTheSamePlans() -> None:
    first, second = ranks.run(2, "test_layer:model_under_a_budget")
    kept, tight, _ = first
    assert first == second and [policy for policy, _ in kept] == ["keep"] * 3 and kept != tight
