# SPDX-License-Identifier: Apache-2.0
"""Trains stages of a GPTModel under Megatron's 1F1B, plain and interleaved, with and without Sluice."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import mg_models
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from mg_cases import moe_layers

STAGES = EP = 2


class PipelineHost(mg_models.Host):
    """A host with this rank's parts of a model of four layers."""

    def __init__(self, how: str, options: dict[str, Any], parts: int | None, **changes: Any) -> None:
        mg_models.groups(EP, STAGES, parts)
        mg_models.forget_aux_losses()
        model_parallel_cuda_manual_seed(1234)
        # Two stages send and receive at once: the host's interleaved schedule then needs its sends one by one.
        overlap = {"overlap_p2p_comm": True, "batch_p2p_comm": False} if parts else {}
        fields = {"num_layers": 4, "pipeline_model_parallel_size": STAGES, **overlap, **changes}
        self.config = mg_models.config_of(EP, virtual_pipeline_model_parallel_size=parts, **fields)
        ddp_config = DistributedDataParallelConfig(average_in_collective=False)
        numbers: list[dict[str, Any]] = [{"vp_stage": part} for part in range(parts)] if parts else [{}]
        models = [self._model(mg_models.spec_of(self.config, how, options, **part), part) for part in numbers]
        self.parts = [DistributedDataParallel(self.config, ddp_config, model) for model in models]
        self.config.finalize_model_grads_func = finalize_model_grads
        no_sync = [part.no_sync for part in self.parts]
        self.config.no_sync_func = no_sync if parts else no_sync[0]
        self.optimizer = mg_models.optimizer_of(self.parts, self.config, ddp_config, 1.0)
        self.model = torch.nn.ModuleList(models)

    def _model(self, spec: Any, part: dict[str, int]) -> GPTModel:
        where = {"ignore_virtual": False, **part} if part else {}
        model = GPTModel(
            config=self.config,
            transformer_layer_spec=spec,
            vocab_size=mg_models.VOCABULARY,
            max_sequence_length=mg_models.SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=False,
            position_embedding_type="learned_absolute",
            **part,
        )
        mg_models.fill(model, EP)
        return model

    def batches(self, steps: int, microbatches: int) -> Any:
        """Returns an iterator for each part, because every part gets all micro-batches."""
        sources = [mg_models.batches(steps, microbatches) for _ in self.parts]
        return sources if self.config.virtual_pipeline_model_parallel_size else sources[0]


def train_both(
    parts: int | None, how: str = "decorated", options: dict[str, Any] | None = None, steps: int = 3, **changes: Any
) -> dict[str, Any]:
    """Does the same as mg_models.train_both, with four micro-batches per step."""
    options = {"gemm": "host", **(options or {})}
    return mg_models.compared(lambda how: PipelineHost(how, options, parts, **changes), how, steps, microbatches=4)


def dies_in_training(folder: str) -> dict[str, Any]:
    """Kills rank 3, of the last stage, in the second step. A rank that gets an error ends, as a script would; ranks of
    the last stage write their errors into the folder, the others return them."""
    host = PipelineHost("decorated", {"gemm": "host"}, None)
    host.train(1, microbatches=4)
    rank = dist.get_rank()
    if rank == 3:
        layer = moe_layers(host.model)[0]
        layer.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    began = time.monotonic()
    try:
        host.train(1, microbatches=4)
        told = ""
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    if rank == 2:
        (Path(folder) / "told").write_text(told)
        os._exit(1)
    return {"told": told, "s": time.monotonic() - began}
