# SPDX-License-Identifier: Apache-2.0
"""Predicts LoRA fine-tuning of a mixture of experts: bytes by part on a rank, tokens per second, changes that help.

Ranks share experts (expert parallelism) and the dense weights (fully_shard). The weights are frozen; adapters, their
gradients and the optimizer's states are f32 and whole on every rank, as PEFT and Trainer have them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ..errors import InvalidArgument
from .architecture import MLP, Block, Decoder, Experts
from .errors import BadInput
from .planner import Choice, Planner, Workload, priced_activation, size, weight_bytes
from .rates import FORMS

UP, DOWN = "experts.gate_up_proj", "experts.down_proj"  # the parameters of PEFT's target_parameters
PARTS = (
    "experts", "dense weights", "gathered weights", "adapters", "gradients", "optimizer", "activations", "logits",
    "exchange buffers", "contexts",
)  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """Has the configuration of a run. targets: names of linear layers, UP and DOWN. tokens: of a rank in a step.
    checkpoints: gradient checkpointing of each decoder layer. keeps_dense: each rank gathers the dense weights once."""

    decoder: Decoder
    ranks: int
    memory: int
    tokens: int
    lora_rank: int = 16
    targets: tuple[str, ...] = ()
    weight_format: str = "plain"
    checkpoints: bool = False
    keeps_dense: bool = False
    activation: str | None = None
    skew: float = 1.0

    @property
    def element(self) -> int:
        return 4 if self.decoder.dtype == "f32" else 2


@dataclass(frozen=True)
class Preview:
    """bytes: by PARTS, on a rank. "contexts" has the plan's bytes: an upper bound under any routing, and the value for
    memory_budget. seconds: of a step, by part."""

    recipe: Recipe
    bytes: dict[str, int]
    seconds: dict[str, float]
    choice: Choice | None
    fits: bool
    trained: int
    errors: tuple[float, float]  # of the machine's predictions, median and 90th percentile
    advice: tuple[str, ...] = field(default=())

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    @property
    def context_bytes(self) -> int:
        return self.bytes["exchange buffers"] + self.bytes["contexts"]

    @property
    def tokens_per_second(self) -> float:
        return self.recipe.ranks * self.recipe.tokens / sum(self.seconds.values())


def targets_of(words: str, decoder: Decoder) -> tuple[str, ...]:
    """Returns the layers that --targets names, also by "attention" and "experts". BadInput names missing layers."""
    linears = dict.fromkeys(name for block in decoder.blocks for name in block.linears)
    groups = {"experts": (UP, DOWN), "attention": tuple(name for name in linears if name not in MLP)}
    found: dict[str, None] = {}
    for word in filter(None, (each.strip() for each in words.split(","))):
        for name in groups.get(word, (word,)):
            if name not in (*linears, UP, DOWN):
                known = ", ".join((*linears, UP, DOWN, *groups))
                raise BadInput(f"--targets names {name!r}; this model has {known}")
            found[name] = None
    if not found:
        raise BadInput("--targets is empty: name at least one layer, such as attention,experts")
    return tuple(found)


# ---- bytes ----


def expert_bytes(experts: Experts, weight_format: str, dtype: str, ranks: int) -> int:
    """Counts bytes of a layer's experts on a rank: codes and scales as the library does, biases in the dense dtype."""
    matrices = sum(sum(weight_bytes(weight_format, dtype, *shape)) for shape in experts.matrices())
    return experts.count // ranks * (matrices + experts.biases * (4 if dtype == "f32" else 2))


def adapter_elements(block: Block, targets: tuple[str, ...], rank: int, ranks: int = 1) -> int:
    """Counts elements of A and B of a decoder layer on a rank: of linear layers, and of the rank's own experts."""
    count = sum(rank * (a + b) for name in targets for a, b in block.linears.get(name, ()))
    if block.experts is not None:
        M, H, E = block.experts.model_width, block.experts.hidden_width, block.experts.count
        count += E // ranks * rank * ((M + 2 * H) * (UP in targets) + (H + M) * (DOWN in targets))
    return count


def _activations(recipe: Recipe) -> int:
    """Returns the bytes of activations outside of the experts. With checkpoints: those of one layer, and the input of
    each."""
    decoder, width = recipe.decoder, recipe.decoder.model_width
    held = [decoder.kept_by(block) for block in decoder.blocks]
    elements = max(held) + len(held) * width if recipe.checkpoints else sum(held)
    return recipe.tokens * elements * recipe.element


def _logits(recipe: Recipe) -> int:
    """Returns the bytes of logits: in the model's dtype, and twice in f32, for the loss and for its gradient."""
    return recipe.tokens * recipe.decoder.vocabulary * (recipe.element + 8)


def _weights(recipe: Recipe) -> dict[str, int]:
    """Returns the bytes of the parts that do not depend on a plan."""
    decoder, ranks = recipe.decoder, recipe.ranks
    dense, trained = decoder.dense * recipe.element, _trained(recipe, ranks)
    shard = -(-dense // ranks)
    gathered = 0
    if ranks > 1:
        # Gathered at the same time: the ends, the layer that runs, and the next layer.
        two = decoder.ends + 2 * max(block.dense for block in decoder.blocks)
        gathered = dense - shard if recipe.keeps_dense else min(dense - shard, two * recipe.element)
    each = (block.experts for block in decoder.moe_blocks if block.experts)
    experts = sum(expert_bytes(one, recipe.weight_format, decoder.dtype, ranks) for one in each)
    values = (experts, shard, gathered, 4 * trained, 4 * trained, 8 * trained, _activations(recipe), _logits(recipe))
    return dict(zip(PARTS, values))


def _trained(recipe: Recipe, ranks: int = 1) -> int:
    """Returns the number of trained elements of the whole model, or on one of the ranks."""
    return sum(adapter_elements(block, recipe.targets, recipe.lora_rank, ranks) for block in recipe.decoder.blocks)


def _linear_adapters(recipe: Recipe) -> int:
    """Returns the number of trained elements of the model outside of the experts."""
    return _trained(replace(recipe, targets=tuple(name for name in recipe.targets if name not in (UP, DOWN))))


# ---- plans and seconds ----


def workload_of(recipe: Recipe, budget: int) -> Workload:
    """Returns the workload of each MoE layer. Without checkpoints every layer has a forward outstanding."""
    experts = recipe.decoder.moe_blocks[0].experts
    assert experts is not None
    shape = experts.model_width, experts.hidden_width, recipe.tokens, experts.count, experts.top_k, recipe.ranks
    return Workload(
        *shape,
        recipe.decoder.dtype,
        gated=True,
        skew=recipe.skew,
        memory_budget=budget,
        max_outstanding=1 if recipe.checkpoints else len(recipe.decoder.moe_blocks),
        activation=priced_activation(recipe.activation),
        may_keep_part=True,
        lora_rank=recipe.lora_rank if {UP, DOWN} & set(recipe.targets) else 0,
        weight_format=recipe.weight_format,
    )


def _plan(planner: Planner, recipe: Recipe, room: int) -> tuple[Workload, Choice, bool]:
    """Returns the fastest plan that fits the rest of the memory, else the plan of fewest bytes, and whether it fits."""
    decision = planner.choose(workload_of(recipe, max(1, room)))
    if decision.chosen is not None:
        return workload_of(recipe, max(1, room)), decision.chosen, True
    leanest = min(decision.candidates, key=lambda each: each.total_bytes)
    return workload_of(recipe, leanest.total_bytes), leanest.choice, False


def _linear_seconds(planner: Planner, recipe: Recipe) -> float:
    """Predicts forward and backward outside of the experts. Adapters have gradients, frozen weights do not."""
    decoder = recipe.decoder
    forward_rate, input_rate, weight_rate = (
        planner.machine.gemm_rate(decoder.dtype, form, recipe.tokens) for form in FORMS
    )
    elements = sum(block.multiplied for block in decoder.blocks)
    routers = sum(block.experts.count * decoder.model_width for block in decoder.moe_blocks if block.experts)
    scores = len(decoder.blocks) * recipe.tokens * decoder.heads * decoder.head_width
    adapters = _linear_adapters(recipe)
    head = decoder.vocabulary * decoder.model_width
    blocks = 2.0 * recipe.tokens * (elements + routers + scores + adapters)
    last = 2.0 * recipe.tokens * head
    again = blocks if recipe.checkpoints else 0.0
    forward = (blocks + again + last) / forward_rate
    backward = (blocks + last) / input_rate + 2.0 * recipe.tokens * adapters / weight_rate
    return forward + backward


def _wire_seconds(planner: Planner, recipe: Recipe) -> dict[str, float]:
    """Returns the seconds of communication: the all-reduce of gradients of linear layers' adapters, and all-gathers of
    dense weights for the forward and the backward. Gradients of an expert's adapters stay on the expert's rank."""
    if recipe.ranks == 1:
        return {}
    data = planner.machine.data
    near = int(data.get("ranks_per_node") or 1) >= recipe.ranks and data.get("node_exchange")
    rate = float((data["node_exchange"] if near else data["exchange"])["bytes_per_second"])
    share = (recipe.ranks - 1) / recipe.ranks
    found = {"gradients": 2 * share * 4 * _linear_adapters(recipe) / rate}
    if not recipe.keeps_dense:
        found["gathering"] = 2 * share * recipe.decoder.dense * recipe.element / rate
    return found


def preview(planner: Planner, recipe: Recipe, advises: bool = True) -> Preview:
    """Predicts a run. Raises BadInput if the model has no experts, or if the ranks do not divide their number."""
    blocks = recipe.decoder.moe_blocks
    if not blocks:
        raise BadInput("no layer of the model has experts")
    experts = blocks[0].experts
    if experts is not None and experts.count % recipe.ranks:
        raise BadInput(f"--ranks is {recipe.ranks}, which does not divide the {experts.count} experts of a layer")
    found = _weights(recipe)
    work, choice, fits = _plan(planner, recipe, recipe.memory - sum(found.values()))
    made = planner.predict(work, choice)
    found["exchange buffers"] = made.bytes["slot"] + made.bytes["header"]
    found["contexts"] = made.bytes["total"] - found["exchange buffers"]
    # The plan of a layer without adapters includes weight gradients, which frozen experts do not have. Pricing it with
    # lora_rank 1 is off by less than a thousandth.
    timed = made if work.is_frozen else planner.predict(work.with_(lora_rank=1), choice)
    again = timed.forward if recipe.checkpoints else 0.0
    errors = made.error_median, made.error_p90
    seconds = {
        "experts": len(blocks) * (timed.seconds + again),
        "rest of the model": _linear_seconds(planner, recipe),
        **_wire_seconds(planner, recipe),
    }
    result = Preview(recipe, found, seconds, choice if fits else None, fits, _trained(recipe), errors)
    if fits or not advises:
        return result
    return replace(result, advice=tuple(_advice(planner, result)))


def _changes(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Yields changes of the recipe, the cheapest first."""
    experts = recipe.decoder.moe_blocks[0].experts
    assert experts is not None
    if not recipe.checkpoints:
        yield "--checkpoint", replace(recipe, checkpoints=True)
    if recipe.keeps_dense:
        yield "no --keep-dense", replace(recipe, keeps_dense=False)
    if recipe.tokens > 1:
        yield f"--tokens {recipe.tokens // 2}", replace(recipe, tokens=recipe.tokens // 2)
    for name in ("int8", "mxfp4", "int4"):
        if recipe.weight_format == "plain" or (recipe.weight_format in ("int8", "fp8") and name != "int8"):
            yield f"--expert-format {name}", replace(recipe, weight_format=name)
    if recipe.lora_rank > 1:
        yield f"--lora-rank {recipe.lora_rank // 2}", replace(recipe, lora_rank=recipe.lora_rank // 2)
    without = tuple(name for name in recipe.targets if name not in (UP, DOWN))
    if without and without != recipe.targets:
        yield "--targets without experts", replace(recipe, targets=without)
    if experts.count % (2 * recipe.ranks) == 0:
        yield f"--ranks {2 * recipe.ranks}", replace(recipe, ranks=2 * recipe.ranks)


def _advice(planner: Planner, made: Preview) -> Iterator[str]:
    """Yields lines about each change by itself, about changes that fit together, and the memory without any change."""
    for words, changed in _changes(made.recipe):
        try:
            alone = preview(planner, changed, advises=False)
        except InvalidArgument:  # a weight format that does not support these widths
            continue
        yield f"{words}: {size(alone.total)}, " + ("fits" if alone.fits else "does not fit by itself")
    together, recipe = [], made.recipe
    for words in [words for words, _ in _changes(made.recipe)]:
        changed = dict(_changes(recipe)).get(words)
        if changed is None:
            continue
        try:
            fits = preview(planner, changed, advises=False).fits
        except InvalidArgument:
            continue
        together.append(words)
        recipe = changed
        if fits:
            yield f"together fit: {', '.join(together)}"
            break
    yield f"--memory {made.total} ({size(made.total)}): fits without a change"
