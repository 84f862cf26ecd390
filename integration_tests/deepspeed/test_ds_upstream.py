# SPDX-License-Identifier: Apache-2.0
"""Runs DeepSpeed's own tests of pipelines, AutoEP and ZeRO-Offload unmodified: each must have the outcome of stock.

The test files are not part of this project. SLUICE_DEEPSPEED_TESTS names the folder "tests" of DeepSpeed's repository,
without the package next to it, which would be imported instead of the installed package. Tests with missing
requirements are skipped.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from host_outcomes import outcomes, printed

TESTS = os.environ.get("SLUICE_DEEPSPEED_TESTS")
SWITCH = Path(__file__).resolve().parent / "upstream"
PIPELINE = {"enabled": True, "on_unsupported": "warn", "pipeline": {}}
LAYERS = {"enabled": True, "on_unsupported": "warn"}
OPTIMIZER = {"enabled": True, "on_unsupported": "warn", "optimizer": True}
# (file, section, whether some of its tests run on Sluice). Most AutoEP tests need a GPU or ZeRO stage 3, which is not
# swapped. The tests of test_autoep_unit make layers without an engine.
FILES = [
    ("unit/runtime/pipe/test_pipe.py", PIPELINE, True),
    ("unit/runtime/pipe/test_pipe_schedule.py", PIPELINE, False),
    ("unit/pipe/test_pipe_module.py", PIPELINE, True),
    ("unit/checkpoint/test_pipeline.py", PIPELINE, True),
    ("unit/v1/moe/test_autoep_unit.py", LAYERS, False),
    ("unit/v1/moe/test_autoep_integration.py", LAYERS, True),
    ("unit/v1/moe/test_autoep_grad_parity.py", LAYERS, True),
    ("unit/v1/moe/test_autoep_checkpoint.py", LAYERS, True),
    ("unit/ops/adam/test_cpu_adam.py", OPTIMIZER, True),
    ("unit/v1/zero/test_zero_cpu_offload_grad_accum.py", OPTIMIZER, False),  # uses torch's optimizer
    ("unit/v1/zero/test_zero2_offload_multi_backward.py", OPTIMIZER, True),
    ("unit/v1/zero/test_zero.py -k Offload", OPTIMIZER, True),
    ("unit/runtime/half_precision/test_zero_optim_overflow.py", OPTIMIZER, True),
    ("unit/runtime/half_precision/test_dynamic_loss_scale.py", OPTIMIZER, False),  # uses only fp16, or Lamb
    ("unit/checkpoint/test_zero_optimizer.py", OPTIMIZER, True),
]
# Stock passes none of these tests: they need fp16, and checkpoints of a pipeline engine read a missing attribute.
FAILS_IN_STOCK = {"unit/checkpoint/test_pipeline.py"}

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not TESTS, reason="SLUICE_DEEPSPEED_TESTS does not name the folder of the host's tests"),
]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("file, section, runs", FILES, ids=[file for file, _, _ in FILES])
def test_HostsOwnTests_WithTheSwitchOn_HaveStocksOutcomes(
    file: str, section: dict[str, Any], runs: bool, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    ran.touch()
    own = {"PYTHONPATH": str(SWITCH), "DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "4", "TORCHDYNAMO_DISABLE": "1"}
    switch = {"SLUICE_TEST_SECTION": json.dumps(section), "SLUICE_TEST_RAN": str(ran)}
    stock, ours = (
        outcomes(TESTS, file.split(), tmp_path / name, **own, **how)[0]
        for name, how in (("stock", {"SLUICE": "0"}), ("sluice", switch))
    )
    counts = printed(stock, ours, ran)
    assert stock and ours == stock
    assert bool(counts) == runs
    if runs:
        assert any(outcome == "passed" for outcome in stock.values()) == (file not in FAILS_IN_STOCK)
