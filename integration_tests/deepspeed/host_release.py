# SPDX-License-Identifier: Apache-2.0
"""Known failures of stock DeepSpeed on the oldest supported release (`./test --oldest-host`)."""

import contextlib
import importlib.metadata
import re
from collections.abc import Iterator

import pytest

HOST = tuple(int(part) for part in re.findall(r"\d+", importlib.metadata.version("deepspeed"))[:2])
IS_OLD = HOST < (0, 16)

CAPACITY = "stock 0.15.4 fails where the capacity exceeds the number of tokens"
K3_NO_DROP = "stock 0.15.4 fails for k > 2 without dropping"
BF16_OPTIMIZER = "stock 0.15.4's BF16_Optimizer (no ZeRO, or gradients kept in f32) fails with MoE layers"
LOADING = "stock 0.15.4 cannot load its own checkpoints with this torch"
CHECKPOINTING = "stock 0.15.4's own activation checkpointing does not run on a CPU"
NO_DUALPIPE = "stock 0.15.4 has no DualPipeV"
OVERFLOW = "stock 0.15.4 looks for infinite gradients in fp16 alone"
WINDOW = "stock 0.15.4 knows no parameters that some backwards of a step do not reach, in stage 2 with offload"
FLOAT_MASK = "stock 0.15.4 takes no used_token in floating point"
LAST_STAGE = "stock 0.15.4's pipeline under ZeRO 1 with another grad_accum_dtype trains its last stage alone"


def _raised(file: str, function: str, error: str) -> str:
    """Returns a pattern of the end of a rank's traceback: this function of the host raised the error."""
    return rf'site-packages/deepspeed/{file}", line \d+, in {function}\n.*\n(?:[ ^~]+\n)?{error}.*\s+(?:rank \d+: |\Z)'


# What the host raises. The other reasons are results that differ.
ERRORS = {
    BF16_OPTIMIZER: _raised("runtime/utils.py", "to_tensor", r"TypeError: new\(\): data must be a sequence"),
    K3_NO_DROP: _raised("moe/sharded_moe.py", "topkgating", "UnboundLocalError: .* 'locations'"),
    CHECKPOINTING: _raised(
        "runtime/activation_checkpointing/checkpointing.py", "forward", "TypeError: 'NoneType' object is not callable"
    ),
}

_expected: list[str] = []


def old_host_fails(reason: str, when: bool = True, hangs: bool = False) -> None:
    """Skips the test on such a release. If the host raises an error, the test first runs until then (host_errors).
    hangs: other ranks of stock then hang, so the test does not run."""
    if IS_OLD and when:
        if reason not in ERRORS or hangs:
            pytest.skip(reason)
        _expected.append(reason)


@contextlib.contextmanager
def host_errors() -> Iterator[None]:
    """Runs a test. One that called old_host_fails must fail with the host's error, and is then skipped."""
    _expected.clear()
    try:
        yield
    except AssertionError as failure:  # of rank_harness, with the tracebacks
        for reason in _expected:
            if re.search(ERRORS[reason], str(failure)):
                pytest.skip(reason)
        raise
    assert not _expected, f"the host does not fail: {_expected}"
