# SPDX-License-Identifier: Apache-2.0
"""The table of benchmarks: name, measured quantity, and module."""

import importlib
from typing import Any, NamedTuple

ROOM = "integration_tests.benchmarks."


class Case(NamedTuple):
    what: str
    place: str  # of a module, or of an object in it

    def load(self) -> Any:
        """The benchmark, as bench.py describes it."""
        module, _, name = self.place.partition(":")
        found = importlib.import_module(module)
        return getattr(found, name) if name else found


CASES = {
    "layer": Case("one layer against DeepSpeed's; eight named cases, or a shape", ROOM + "layer.layer"),
    "grid": Case("57 cells over every axis, 20 pairs each", ROOM + "layer.grid"),
    "train": Case("training steps of examples/text_lm", ROOM + "train.train"),
    "experts": Case("transformers' experts block against grouped_mm and a roofline", ROOM + "experts.experts"),
    "finetune": Case("adapters and experts in MXFP4, against frozen experts and PEFT", ROOM + "experts.finetune"),
    "ep": Case("transformers' expert parallelism against all_to_all", ROOM + "hosts.compare:EP"),
    "megatron": Case("layers of Megatron-Core", ROOM + "hosts.compare:MEGATRON"),
    "autoep": Case("layers of DeepSpeed's AutoEP", ROOM + "hosts.compare:AUTOEP"),
    "stock": Case("the model of stock layers: what it counts and predicts, measured", ROOM + "hosts.stock"),
    "two_levels": Case("a layer deduplicated by node, by rank, and as the tuner chooses", ROOM + "turns.two_levels"),
    "overlap": Case("the overlap reached, of what is possible", ROOM + "turns.overlap"),
    "overhead": Case("what tuning costs a run of 10,000 steps", ROOM + "turns.overhead"),
    "restore": Case("bytes and time of every restore policy", ROOM + "restore.restore"),
    "blocks": Case("sluice.plan_model under ten budgets, against checkpointing", ROOM + "restore.blocks"),
    "tuner": Case("regret of the tuner, errors of its predictions, baselines", ROOM + "tuner.tuner"),
    "scenarios": Case(
        "drawn runs: adaptive against fixed pairs and the papers' selectors", ROOM + "scenarios.scenarios"
    ),
    "moves": Case("experts that move under skewed loads", ROOM + "moves.moves"),
    "live": Case("layers that change stages during a batch", ROOM + "live.live"),
    "stages": Case("pipelines by the hosts' schedules and by Sluice's; bubbles", ROOM + "stages.stages"),
    "optimizer": Case("AdamW in host memory, against DeepSpeed's and torch's", ROOM + "optimizer.optimizer"),
    "papers": Case("the papers' figures, simulated", ROOM + "papers.papers"),
}
