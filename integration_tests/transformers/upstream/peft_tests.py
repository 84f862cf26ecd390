# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest for PEFT's own tests: all their models are in the cache, and their experts can run on Sluice.

SLUICE_TEST_RAN switches experts to "sluice" in models that name no implementation. Each of their forwards with adapters
that the library adds appends the name of the running test to that file.
"""

from __future__ import annotations

import collections
import os
import sys
from typing import Any

RAN = os.environ.get("SLUICE_TEST_RAN")


class _Cached(collections.Counter[str]):
    """Replaces PEFT's table of the models that tests need not look for in the hub."""

    def __contains__(self, name: object) -> bool:
        return True


def pytest_collection_finish() -> None:
    sys.modules["tests.testing_utils"]._HUB_MODEL_ACCESSES = _Cached()  # type: ignore[attr-defined]
    if RAN:
        _switch_on(RAN)


def _switch_on(ran: str) -> None:
    from sluice.adapters.transformers import low_rank
    from transformers import PreTrainedModel

    choose, take = PreTrainedModel.get_correct_experts_implementation, low_rank.take

    def chosen(self: Any, requested_experts: str | None) -> str:
        return choose(self, requested_experts or "sluice")

    def counting(experts: Any) -> Any:
        terms = take(experts)
        if terms:
            with open(ran, "a") as file:
                file.write(os.environ.get("PYTEST_CURRENT_TEST", "?").rpartition(" ")[0] + "\n")
        return terms

    PreTrainedModel.get_correct_experts_implementation = chosen
    low_rank.take = counting
