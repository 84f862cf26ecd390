# SPDX-License-Identifier: Apache-2.0
"""Ranks for tests of transformers: their processes have imported torch and the models before a test begins."""

from pathlib import Path

from rank_harness import Ranks


class TransformersRanks(Ranks):
    host = "transformers"
    python_path = str(Path(__file__).resolve().parent)
    imports = (
        *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "transformers"),
        *("transformers.trainer", "accelerate.state", "peft"),
        *(f"transformers.models.{kind}.modeling_{kind}" for kind in ("deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe")),
    )
