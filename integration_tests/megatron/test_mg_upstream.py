# SPDX-License-Identifier: Apache-2.0
"""Runs Megatron's own tests of its MoE layers, unmodified, on two ranks: each has the outcome of stock.

Their files are not part of this project: SLUICE_MEGATRON_TESTS names a folder that holds the folders "megatron" and
"tests" of its repository at the tag core_v0.16.1. `upstream/cpu_tests.py` wraps them. Tests that need Transformer
Engine or more ranks skip or fail, in stock as here.
"""

import os
import socket
from pathlib import Path

import pytest
from host_outcomes import outcomes, printed

ROOT = os.environ.get("SLUICE_MEGATRON_TESTS")
AROUND = Path(__file__).resolve().parent / "upstream"
MOE = "tests/unit_tests/transformer/moe"
# (file, whether any of its tests runs on Sluice). Tests of GroupedMLP import Transformer Engine and cannot be collected
# without it, with stock either. Those of the dispatcher and of checkpoints build layers, or experts alone, and call
# parts that Sluice does not call: test_mg_training.py and test_mg_layer.py test the same on whole layers.
FILES = [
    (f"{MOE}/test_moe_layer.py", True),
    (f"{MOE}/test_sequential_mlp.py", True),
    (f"{MOE}/test_grouped_mlp.py", False),
    (f"{MOE}/test_routers.py", True),
    (f"{MOE}/test_a2a_token_dispatcher.py", False),
    ("tests/unit_tests/dist_checkpointing/models/test_moe_experts.py", False),
]

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not ROOT, reason="SLUICE_MEGATRON_TESTS does not name the folder of the host's tests"),
]


def _outcomes(folder: Path, file: str, **environment: str) -> list[dict[str, str]]:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    own = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    own |= {"TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(AROUND)}
    words = ["-p", "cpu_tests", "--timeout", "120", file]
    return outcomes(ROOT, words, folder, ranks=2, **own, **environment)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("file, runs", FILES, ids=[file for file, _ in FILES])
def test_HostsOwnTests_OnSluice_HaveStocksOutcomes(file: str, runs: bool, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    ran.touch()
    stock = _outcomes(tmp_path / "stock", file)
    options = '{"on_unsupported": "warn"}'
    switch = {"SLUICE_TEST_LAYER": "1", "SLUICE_TEST_RAN": str(ran), "SLUICE_OPTIONS": options}
    ours = _outcomes(tmp_path / "sluice", file, **switch)
    counts = printed(stock[0], ours[0], ran)
    assert stock[0] and ours == stock
    assert bool(counts) == runs
