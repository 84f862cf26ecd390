# SPDX-License-Identifier: Apache-2.0
"""Runs PEFT's own tests of `target_parameters` unmodified: each has the outcome of stock.

Their files are not part of this project. SLUICE_PEFT_TESTS names the unpacked source distribution of the installed PEFT
(`pip download --no-deps --no-binary peft peft==VERSION`). PYTHONPATH names a folder with the packages that the tests
import and .venv lacks: datasets, diffusers (with its own requirements), parameterized and scipy. The tests load models
by name. These are made here with random weights, since there is no access to the hub.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from host_outcomes import outcomes, printed
from transformers import AutoModelForCausalLM, GptOssConfig, Llama4TextConfig, LlamaConfig, MixtralConfig, OPTConfig
from transformers.models.qwen3_moe import Qwen3MoeConfig

TESTS = os.environ.get("SLUICE_PEFT_TESTS")
PLUGIN = Path(__file__).resolve().parent / "upstream"
# (files and options, whether some of their adapters run on Sluice). Experts of Llama 4 never do: their class
# has no choice of an implementation.
FILES = [
    ("tests/test_target_parameters.py", True),
    (
        "tests/test_integrations.py tests/test_initialization.py tests/test_low_level_api.py tests/test_tuners_utils.py"
        " tests/test_helpers.py tests/test_custom_models.py -k",
        True,
    ),
]
CHOSEN = "target_param or TargetedParam or qwen3_moe or mixtral_v5 or kappatune_with_moe or nn.Parameter"
# Asserts that PEFT forms W + BA twice in each forward. Sluice never forms it.
COUNTS_SUMS = "tests.test_target_parameters.TestTargetParameters::test_target_parameter_result_caching_works"
OPT = {"vocab_size": 1000, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16}
LLAMA = {**OPT, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 32}
MOE = {**LLAMA, "num_experts_per_tok": 2}
MODELS: dict[str, Any] = {
    "hf-internal-testing/Mixtral-tiny": lambda: MixtralConfig(**MOE, num_local_experts=4),
    "hf-internal-testing/tiny-random-LlamaForCausalLM": lambda: LlamaConfig(**LLAMA),
    "peft-internal-testing/opt-125m": lambda: OPTConfig(**OPT, ffn_dim=32, word_embed_proj_dim=16),
    "trl-internal-testing/tiny-GptOssForCausalLM": lambda: GptOssConfig(**MOE, num_local_experts=4),
    "trl-internal-testing/tiny-Llama4ForCausalLM": lambda: Llama4TextConfig(
        **LLAMA, intermediate_size_mlp=32, num_local_experts=4, interleave_moe_layer_step=1, pad_token_id=0
    ),
    "trl-internal-testing/tiny-Qwen3MoeForCausalLM": lambda: Qwen3MoeConfig(
        **MOE, moe_intermediate_size=32, num_experts=4
    ),
    "trl-internal-testing/tiny-random-LlamaForCausalLM": lambda: LlamaConfig(**LLAMA),
}

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not TESTS, reason="SLUICE_PEFT_TESTS does not name the folder of PEFT"),
]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a home of huggingface_hub that has the models in its cache."""
    home, commit = tmp_path_factory.mktemp("hub"), "0" * 40
    for name, config in MODELS.items():
        folder = home / "hub" / f"models--{name.replace('/', '--')}"
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config()).save_pretrained(folder / "snapshots" / commit)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(commit)
    return home


@functools.cache
def _outcomes(hub: Path, files: str, **environment: str) -> dict[str, str]:
    path = os.pathsep.join([str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"HF_HOME": str(hub), "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    chosen = [*files.split(), CHOSEN] if files.endswith("-k") else [files]
    # No settings of PEFT's: they need pytest-cov. The source distribution has no tests/__init__.py.
    around = ["-p", "peft_tests", "-c", os.devnull, "--rootdir", ".", "--import-mode=importlib"]
    return outcomes(TESTS, [*around, *chosen], hub, **own, **environment)[0]


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("switched_on", [False, True], ids=["registered", "chosen"])
@pytest.mark.parametrize("files, runs", FILES, ids=["target_parameters", "others"])
def test_PeftsOwnTests_WithSluice_HaveStocksOutcomes(
    files: str, runs: bool, switched_on: bool, hub: Path, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    ran.touch()
    stock = dict(_outcomes(hub, files, SLUICE="0"))
    ours = dict(_outcomes(hub, files, **({"SLUICE_TEST_RAN": str(ran)} if switched_on else {})))
    counts = printed(stock, ours, ran)
    if switched_on and COUNTS_SUMS in stock:
        assert stock.pop(COUNTS_SUMS) == "passed"
        assert "assert 0 == 2" in ours.pop(COUNTS_SUMS)
    assert "passed" in stock.values()
    assert ours == stock
    assert bool(counts) == (switched_on and runs)
