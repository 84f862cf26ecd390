# SPDX-License-Identifier: Apache-2.0
"""Trains a small GPTModel with experts under Megatron's own DDP, optimizer and schedule, with and without Sluice."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import sluice
import torch
from megatron.core import parallel_state
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.spec_utils import import_module
from megatron.core.transformer.transformer_config import TransformerConfig
from sluice import megatron as ours
from torch.nn import functional as F

VOCABULARY, SEQUENCE, BATCH = 96, 16, 2
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "squared_relu": squared_relu,
    "quick_gelu": quick_gelu,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def groups(ep: int, stages: int = 1, parts: int | None = None) -> None:
    """Creates Megatron's process groups with these sizes of expert and pipeline parallelism, and destroys other ones.

    parts  of the model on each stage, for the interleaved schedule
    """
    if parallel_state.model_parallel_is_initialized():
        found = (
            parallel_state.get_expert_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        )
        if found == (ep, stages, parts):
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1, stages, parts, expert_model_parallel_size=ep)


def config_of(ep: int, **changes: Any) -> TransformerConfig:
    """Returns the smallest config with all features; changes are fields of TransformerConfig, some by name."""
    fields: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_hidden_size": 64,
        "moe_ffn_hidden_size": 48,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.02,
        "moe_z_loss_coeff": 0.001,
        "expert_model_parallel_size": ep,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": "silu",
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "params_dtype": "float32",
        "transformer_impl": "local",
        **changes,
    }
    fields["activation_func"] = ACTIVATIONS[fields["activation_func"]]
    fields["params_dtype"] = fields["pipeline_dtype"] = DTYPES[fields["params_dtype"]]
    fields["bf16"] = fields["params_dtype"] == torch.bfloat16
    return TransformerConfig(**fields)


def spec_of(config: TransformerConfig, how: str, options: dict[str, Any], **part: Any) -> Any:
    """Returns a spec: "stock", "decorated", or "named", which is looked up as by --spec. part: the vp_stage."""
    if how == "named":
        return import_module(("sluice.megatron", "moe_block_spec"))
    stock = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization, **part)
    return stock if how == "stock" else ours.with_sluice(stock, **options)


def parts_of(
    ep: int,
    how: str = "stock",
    options: dict[str, Any] | None = None,
    stages: int = 1,
    parts: int | None = None,
    **changes: Any,
) -> list[GPTModel]:
    """Returns this rank's parts of a model whose weights depend on their global names alone. parts: see `groups`"""
    groups(ep, stages, parts)
    forget_aux_losses()
    model_parallel_cuda_manual_seed(1234)
    # Two stages send and receive at once: the host's interleaved schedule then needs its sends one by one.
    overlap = {"overlap_p2p_comm": True, "batch_p2p_comm": False} if parts else {}
    sizes = {"pipeline_model_parallel_size": stages, "virtual_pipeline_model_parallel_size": parts}
    config = config_of(ep, **sizes, **overlap, **changes)
    found = []
    for number in range(parts or 1):
        part = {"vp_stage": number} if parts else {}
        where = {"ignore_virtual": False, **part} if parts else {}
        found.append(
            GPTModel(
                config=config,
                transformer_layer_spec=spec_of(config, how, options or {}, **part),
                vocab_size=VOCABULARY,
                max_sequence_length=SEQUENCE,
                pre_process=parallel_state.is_pipeline_first_stage(**where),
                post_process=parallel_state.is_pipeline_last_stage(**where),
                position_embedding_type="learned_absolute",
                **part,
            )
        )
        fill(found[-1], ep)
    return found


def model_of(ep: int, how: str = "stock", options: dict[str, Any] | None = None, **changes: Any) -> GPTModel:
    """Returns a whole model."""
    return parts_of(ep, how, options, **changes)[0]


def forget_aux_losses() -> None:
    """Clears the process's records of models with another number of layers, or trained without a schedule."""
    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
    if hasattr(moe_utils, "get_moe_metrics_tracker"):
        moe_utils.get_moe_metrics_tracker().metrics.clear()  # its own clear() keeps the sizes of another model
    else:
        moe_utils.get_moe_layer_wise_logging_tracker().clear()


def global_name(name: str, ep: int, num_experts: int) -> str:
    """Returns the name with the global number of the expert."""
    first = parallel_state.get_expert_model_parallel_rank() * (num_experts // ep)
    return re.sub(r"local_experts\.(\d+)", lambda found: f"local_experts.{first + int(found[1])}", name)


def fill(model: torch.nn.Module, ep: int) -> None:
    """Fills matrices with random numbers by their global names; vectors keep their ones (norms) and zeros (biases)."""
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        whole = global_name(name, ep, model.config.num_moe_experts)
        if name.endswith(("weight1", "weight2")):
            whole += f" of {parallel_state.get_expert_model_parallel_rank()}"
        generator = torch.Generator().manual_seed(zlib.crc32(whole.encode()))
        scale = 0.5 if "router" in name else 0.08
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def batches(steps: int, microbatches: int, batch: int = BATCH) -> Iterator[torch.Tensor]:
    """Yields the tokens [B, S + 1] of this data-parallel rank."""
    rank = parallel_state.get_data_parallel_rank()
    for number in range(steps * microbatches):
        generator = torch.Generator().manual_seed(1000 * number + rank)
        yield torch.randint(0, VOCABULARY, (batch, SEQUENCE + 1), generator=generator)


def forward_step(data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Runs the forward of a micro-batch, as training scripts do."""
    tokens = next(data)
    positions = torch.arange(SEQUENCE).expand(tokens.shape[0], -1)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    output = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous())

    def loss_of(given: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = given.float().mean()
        return loss, {"loss": loss.detach().clone()}  # the schedule divides the returned loss in place

    return output, loss_of


Around = Callable[[Iterator[torch.Tensor], Any], tuple[torch.Tensor, Callable[..., Any]]]


class Tape:
    """Records the routes of all micro-batches of a training, and replays them in another, so that near ties do not
    change. It applies to the next model that is built."""

    def __init__(self) -> None:
        self._routes: list[list[torch.Tensor]] = []
        self.rewind()

    def rewind(self) -> None:
        """Starts from the first micro-batch again. Must be called before the next model is built."""
        self._position = 0
        RouterReplay.clear_global_router_replay_instances()

    def record(self, data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        """See Host.train."""
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        found = forward_step(data, model)
        self._routes.append([indices.clone() for indices in RouterReplay.get_recorded_data()])
        return found

    def replay(self, data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        """See Host.train."""
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        RouterReplay.set_replay_data(self._routes[self._position])
        self._position += 1
        return forward_step(data, model)


def optimizer_of(parts: list[Any], config: Any, ddp: DistributedDataParallelConfig, clip: float) -> Any:
    """Returns Megatron's own optimizer."""
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=2e-3,
            weight_decay=0.01,
            clip_grad=clip,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=ddp.use_distributed_optimizer,
            overlap_param_gather=ddp.overlap_param_gather,
        ),
        parts,
    )


class Host:
    """A model, or the parts of a stage, in Megatron's DDP with Megatron's optimizer. changes: also `stages` and `parts`
    of `parts_of`"""

    def __init__(
        self,
        ep: int,
        how: str,
        options: dict[str, Any] | None = None,
        ddp: dict[str, Any] | None = None,
        clip: float = 1.0,
        **changes: Any,
    ) -> None:
        models = parts_of(ep, how, options, **changes)
        self.model = models[0] if len(models) == 1 else torch.nn.ModuleList(models)
        self.config = config = models[0].config
        ddp_config = DistributedDataParallelConfig(**{"average_in_collective": False, **(ddp or {})})
        inner = [Float16Module(config, model) if config.bf16 else model for model in models]
        self.parts = [DistributedDataParallel(config, ddp_config, model) for model in inner]

        def of_parts(name: str) -> Any:
            """Returns a method of the parts, in a list if the schedule is interleaved."""
            methods = [getattr(part, name) for part in self.parts]
            return methods if config.virtual_pipeline_model_parallel_size else methods[0]

        config.finalize_model_grads_func = finalize_model_grads
        config.no_sync_func = of_parts("no_sync")
        if ddp_config.overlap_grad_reduce:
            config.grad_sync_func = of_parts("start_grad_sync")
        if ddp_config.overlap_param_gather:
            config.param_sync_func = of_parts("start_param_sync")
        self.optimizer = optimizer_of(self.parts, config, ddp_config, clip)

    def batches(self, steps: int, microbatches: int) -> Any:
        """Returns the schedule's micro-batches, or an iterator for each part, because every part gets all of them."""
        sources = [batches(steps, microbatches) for _ in self.parts]
        return sources if self.config.virtual_pipeline_model_parallel_size else sources[0]

    def train(
        self,
        steps: int,
        microbatches: int = 2,
        around: Around = forward_step,
        before_update: Callable[[int], None] | None = None,
    ) -> dict[str, list[float]]:
        """Returns the loss and gradient norm of each step on this rank (0: without clipping). around: wraps the forward
        of a micro-batch. before_update: is called with the step when its gradients are complete."""
        data = self.batches(steps, microbatches)
        found: dict[str, list[float]] = {"losses": [], "norms": []}
        for part in self.parts:
            part.train()
        for _ in range(steps):
            for part in self.parts:
                part.zero_grad_buffer()
            self.optimizer.zero_grad()
            losses = get_forward_backward_func()(
                forward_step_func=around,
                data_iterator=data,
                model=self.parts,
                num_microbatches=microbatches,
                seq_length=SEQUENCE,
                micro_batch_size=BATCH,
                forward_only=False,
            )
            if before_update is not None:
                before_update(len(found["losses"]))
            _, norm, _ = self.optimizer.step()
            found["losses"].append(sum(float(loss["loss"]) for loss in losses) / microbatches)
            found["norms"].append(0.0 if norm is None else float(norm))
        return found

    def parameters(self) -> dict[str, torch.Tensor]:
        """Returns copies of the parameters in f32, by name."""
        return {name: parameter.detach().float().clone() for name, parameter in self.model.named_parameters()}

    def router_biases(self) -> list[float]:
        """Returns the biases of routers with moe_router_enable_expert_bias: the host updates them by token counts."""
        named = self.model.named_buffers()
        return [value for name, bias in named if name.endswith("router.expert_bias") for value in bias.tolist()]


def gaps(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Returns the largest distance of two models' parameters, over the largest parameter."""
    assert one.keys() == other.keys() and one
    largest = max(float(value.abs().max()) for value in one.values())
    return max(float((one[name] - other[name]).abs().max()) for name in one) / largest


def train_both(
    ep: int,
    steps: int = 3,
    how: str = "decorated",
    options: dict[str, Any] | None = None,
    replayed: bool = False,
    microbatches: int = 2,
    **changes: Any,
) -> dict[str, Any]:
    """Trains by stock and by Sluice, and returns the difference of their results. replayed: with the routes of stock,
    so that near ties do not change."""
    options = {"gemm": "host", **(options or {})}
    if replayed:
        changes["moe_enable_routing_replay"] = True
    tape = Tape() if replayed else None
    stock = Host(ep, "stock", **changes)
    first = stock.parameters()
    wanted = stock.train(steps, microbatches, forward_step if tape is None else tape.record)
    if tape is not None:
        tape.rewind()
    mine = Host(ep, how, options, **changes)
    before = sluice.stats(mine.model, reset_peak=True)["contexts"][-1]  # earlier models may have used this context
    found = mine.train(steps, microbatches, forward_step if tape is None else tape.replay)
    stats = sluice.stats(mine.model)
    total = stats["contexts"][-1]
    return {
        "stock": wanted,
        "sluice": found,
        "gap": gaps(stock.parameters(), mine.parameters()),
        "moved": gaps(stock.parameters(), first),
        "passes": total["num_passes"] - before["num_passes"],
        "passes_in_place": total["passes_in_place"] - before["passes_in_place"],
        "computed_by": sorted({each["computed_by"] for each in stats["layers"]}),
        "layers": len(stats["layers"]),
        "router_biases": [stock.router_biases(), mine.router_biases()],
        **{name: total[name] for name in ("most_outstanding", "planned_outstanding", "peak_bytes")},
    }
