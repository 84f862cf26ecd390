# SPDX-License-Identifier: Apache-2.0
"""Tests that unsupported models are rejected with class, attribute and remedy, and wrong options with the key."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sluice
import tf_families
import tf_models
import torch
from sluice import settings
from sluice.config import ConfigError
from sluice.errors import InvalidArgument, OverBudget, Unsupported
from tf_compare import check, rows
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode


def make(kind: str = "mixtral") -> torch.nn.Module:
    return tf_families.make(kind, dict(tf_families.classes())[kind], 16, 8, 4)


def run(module: torch.nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    given = rows(16, 4, 5, 2)
    return module(given.tokens.to(dtype), given.ids, given.weights)


def refuse(module: torch.nn.Module, kind: type[Exception], *words: str, dtype: torch.dtype = torch.float32) -> None:
    with pytest.raises(kind) as caught:
        run(module, dtype)
    for word in ("MixtralExperts", 'experts_implementation="eager"', *words):
        assert word in str(caught.value), caught.value


def test_Dtype_F64_IsRefused() -> None:
    refuse(make().double(), Unsupported, "gate_up_proj", "float64", "dtype=torch.float32", dtype=torch.float64)


def test_Dtype_TwoInOneModule_IsRefused() -> None:
    module = make()
    module.down_proj.data = module.down_proj.data.bfloat16()
    refuse(module, Unsupported, "down_proj", "bfloat16", "float32")


@pytest.mark.parametrize("wanted", [True, False])
def test_Ids_OutsideOfTheExperts_AreRefusedAsByEager(wanted: bool) -> None:
    """transformers marks a dropped route by the number of experts; other ids outside of the range are rejected."""
    module, given = make(), rows(16, 4, 5, 2)
    eager = make()
    eager.config._experts_implementation = "eager"
    eager.load_state_dict(module.state_dict())
    with torch.set_grad_enabled(wanted):
        for _ in range(2):  # without gradients, the second call takes the fast path
            assert torch.allclose(
                module(given.tokens, given.ids, given.weights), eager(given.tokens, given.ids, given.weights), atol=1e-5
            )
            for bad in (-1, 5, 1000):
                ids = given.ids.clone()
                ids[2, 1] = bad
                with pytest.raises(RuntimeError, match="Class values must be"):
                    eager(given.tokens, ids, given.weights)
                said = rf"MixtralExperts: top_k_index\[2, 1\] is {bad}; ids lie in \[0, 4\), or 4 for a route"
                with pytest.raises(InvalidArgument, match=said):
                    module(given.tokens, ids, given.weights)
            ids[2, 1] = 4
            found = module(given.tokens, ids, given.weights)
            assert torch.allclose(found, eager(given.tokens, ids, given.weights), atol=1e-5)


def test_Device_ParametersElsewhere_IsRefused() -> None:
    refuse(make().to("meta"), Unsupported, "gate_up_proj", "meta", "move the model")


def test_Device_RowsElsewhere_IsRefused() -> None:
    module, given = make(), rows(16, 4, 5, 2)
    with pytest.raises(Unsupported, match="MixtralExperts: hidden_states is on meta"):
        module(given.tokens.to("meta"), given.ids, given.weights)


def test_Layout_Wrong_IsRefused() -> None:
    module = make()
    module.gate_up_proj = torch.nn.Parameter(torch.randn(4, 12, 16))
    refuse(module, InvalidArgument, "gate_up_proj has shape [4, 12, 16]", "[4, 16, 16]", "is_transposed=False")


def test_Contract_FlagMissing_IsRefused() -> None:
    module = make()
    del module.is_transposed
    refuse(module, Unsupported, "is_transposed")


def test_Contract_ParameterMissing_IsRefused() -> None:
    module = make()
    del module.down_proj
    refuse(module, Unsupported, "down_proj", "absent")


def test_Contract_QuantisedTensor_IsRefused() -> None:
    class Packed(torch.Tensor):
        pass

    module = make()
    packed = torch.nn.Parameter(module.gate_up_proj.detach()).as_subclass(Packed)
    del module.gate_up_proj
    module.gate_up_proj = packed
    refuse(module, Unsupported, "gate_up_proj is a Packed")


def test_Shapes_OfRows_AreNamed() -> None:
    module, given = make(), rows(16, 4, 5, 2)
    with pytest.raises(InvalidArgument, match=r"MixtralExperts: hidden_states has shape \[5, 12\]"):
        module(given.tokens[:, :12], given.ids, given.weights)
    with pytest.raises(InvalidArgument, match="MixtralExperts: top_k_index has shape"):
        module(given.tokens, given.ids, given.weights[:, :1])


@pytest.fixture
def configured() -> Any:
    yield sluice.configure
    sluice.configure()


def test_Configure_BadKeysAndValues_AreErrors(configured: Any) -> None:
    with pytest.raises(ConfigError, match='did you mean "chunks"'):
        configured(chunk=2)
    with pytest.raises(ConfigError, match="chunks"):
        configured(chunks=0)
    assert settings.effective(environ={}).chunks is None


def test_Configure_EnvironmentThenUserThenModel(configured: Any) -> None:
    configured(wgrad_mode="per_chunk")
    found = settings.effective({"chunks": 3}, {"SLUICE_OPTIONS": json.dumps({"chunks": 5})})
    assert (found.chunks, found.wgrad_mode) == (5, "per_chunk")
    assert settings.effective({"chunks": 3}, {}).chunks == 3
    assert settings.effective({"enabled": False}, {}) is None
    assert settings.effective({"chunks": 3}, {"SLUICE": "0"}) is None
    configured(chunks=2)
    assert settings.effective({"chunks": 3}, {}).chunks == 2
    with pytest.raises(ConfigError, match="SLUICE_OPTIONS"):
        settings.effective(None, {"SLUICE_OPTIONS": "chunks=2"})


def test_Configure_EachSource_ReachesTheLayer(configured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def chunks_of(module: torch.nn.Module) -> int:
        check(module, rows(16, 4, 50, 2))
        return int(sluice.stats(module)["contexts"][0]["last_num_chunks"])

    module = make()
    for chunks in (1, 3):
        configured(chunks=chunks)
        assert chunks_of(module) == chunks
    module.config.sluice = {"chunks": 2, "wgrad_mode": "per_chunk"}
    assert chunks_of(module) == 3
    configured()
    assert chunks_of(module) == 2
    monkeypatch.setenv("SLUICE_OPTIONS", '{"chunks": 4}')
    assert chunks_of(make()) == 4
    module = make()
    module.config.sluice = {"chnks": 2}
    with pytest.raises(ConfigError, match="chunks"):
        run(module)


def test_MemoryBudget_OverAllLayers_HoldsOrNamesTheShortfall(configured: Any) -> None:
    wanted = tf_models.step(tf_models.make("mixtral"), tf_models.batch())
    configured(memory_budget="64MiB")
    model = tf_models.make("mixtral")
    found = tf_models.step(model, tf_models.batch())
    assert max(tf_models.gaps(found, wanted).values()) < 2e-5
    experts = [module for name, module in model.named_modules() if name.endswith("experts")]
    assert all(0 < sluice.stats(module)["contexts"][0]["peak_bytes"] <= 64 << 20 for module in experts)
    configured(memory_budget="300KiB")
    with pytest.raises(OverBudget, match="memory_budget"):
        tf_models.step(tf_models.make("mixtral"), tf_models.batch())


@pytest.mark.parametrize("spare", [1.02, 1.2, 1.4, 1.6, 1.8, 2.0, 2.4])
def test_MemoryBudget_JustAboveTheLeast_IsSharedByTheLayersToCome(configured: Any, spare: float) -> None:
    """The first layer's plan leaves memory for the steps of layers that do not exist yet."""
    configured(memory_budget=1 << 10, gemm="ref")
    with pytest.raises(OverBudget) as refused:
        tf_models.step(tf_models.make("mixtral", num_hidden_layers=6), tf_models.batch())
    needed = re.search(r" needs (\d+)\b", str(refused.value))
    assert needed is not None
    budget = int(int(needed[1]) * spare) + (64 << 10)  # the tables of five more layers
    configured(memory_budget=budget, gemm="ref")
    model = tf_models.make("mixtral", num_hidden_layers=6)
    found = tf_models.step(model, tf_models.batch())
    configured()
    wanted = tf_models.step(tf_models.make("mixtral", num_hidden_layers=6), tf_models.batch())
    assert max(tf_models.gaps(found, wanted).values()) < 2e-5
    experts = [module for name, module in model.named_modules() if name.endswith("experts")]
    assert len(experts) == 6
    assert all(0 < sluice.stats(module)["contexts"][0]["peak_bytes"] <= budget for module in experts)


def test_SwitchedOff_TransformersComputes(
    configured: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.adapters.transformers.experts._announced", set())  # each kind once in a process
    module = make()
    configured(enabled=False)
    check(module, rows(16, 4, 50, 2))
    assert "off" in capfd.readouterr().out
    assert sluice.stats(module)["layers"][0]["computed_by"] == "transformers"


def test_StateOfAModule_HasNoWordOfSluice(tmp_path: Any) -> None:
    module = make()
    run(module)
    torch.save(module.state_dict(), tmp_path / "state.pt")
    assert set(torch.load(tmp_path / "state.pt")) == {"gate_up_proj", "down_proj"}
    assert not [name for name in module.__dict__ if "sluice" in name.lower()]


def test_Registration_ByEntryPointAndByImport_NeitherImportsTheHost() -> None:
    code = """
import sys, torch
assert "transformers" not in sys.modules
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.distributed.expert_parallel import EPImplementationInterface
assert "sluice" in ALL_EXPERTS_FUNCTIONS and "sluice" in EPImplementationInterface()
assert "sluice.adapters.transformers.experts" not in sys.modules
assert "sluice.adapters.transformers.transport" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=140)
    code = """
import os, sys
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
assert "sluice" not in ALL_EXPERTS_FUNCTIONS
from transformers.distributed.expert_parallel import EPImplementationInterface
assert "sluice" not in EPImplementationInterface()
import sluice
assert "sluice" in ALL_EXPERTS_FUNCTIONS and "sluice" in EPImplementationInterface()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=140)


def test_Doctor_SaysThatItIsRegistered() -> None:
    from sluice import doctor

    found = {finding.check: finding for finding in doctor.examine()}
    assert found["transformers"].state == doctor.OK, found["transformers"]


def _vmapped(module: torch.nn.Module, given: Any) -> None:
    torch.func.vmap(lambda tokens: module(tokens, given.ids, given.weights))(given.tokens[None])


def _functional_grad(module: torch.nn.Module, given: Any) -> None:
    torch.func.grad(lambda tokens: module(tokens, given.ids, given.weights).sum())(given.tokens)


def _forward_mode(module: torch.nn.Module, given: Any) -> None:
    with torch.autograd.forward_ad.dual_level():
        module(torch.autograd.forward_ad.make_dual(given.tokens, given.tokens), given.ids, given.weights)


def _fx(module: torch.nn.Module, given: Any, **how: Any) -> None:
    make_fx(lambda tokens: module(tokens, given.ids, given.weights), **how)(given.tokens)


def _early_fx(module: torch.nn.Module, given: Any) -> None:
    _fx(module, given, pre_dispatch=True)


def _exported(module: torch.nn.Module, given: Any) -> None:
    torch.export.export(module, (given.tokens, given.ids, given.weights))


def _traced(module: torch.nn.Module, given: Any) -> None:
    torch.jit.trace(module.requires_grad_(False), (given.tokens, given.ids, given.weights))


def _fake(module: torch.nn.Module, given: Any) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        module(mode.from_tensor(given.tokens), given.ids, given.weights)


@pytest.mark.usefixtures("one_gemm")
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize(
    "way, said",
    [
        (_vmapped, "torch.func"),
        (_functional_grad, "torch.func"),
        (_forward_mode, "forward-mode"),
        (_fx, "make_fx"),
        (_early_fx, "make_fx"),
        (_exported, ""),
        (_traced, "torch.jit.trace"),
        (_fake, "FakeTensorMode"),
    ],
)
def test_Watchers_ThatCannotSeeInside_AreRefused(way: Any, said: str, grad: bool) -> None:
    """Otherwise a graph would silently lack the experts, and forward-mode tangents would be lost."""
    module, given = make(), rows(16, 4, 5, 2)
    with torch.set_grad_enabled(grad):
        wanted = run(module)
        with pytest.raises(Unsupported) as caught:
            way(module, given)
        for word in ("MixtralExperts", 'experts_implementation="batched_mm"', said):
            assert word in str(caught.value), caught.value
        with FlopCounterMode(display=False):  # a mode that observes and changes nothing is allowed
            assert torch.equal(run(module), wanted)


def test_Compile_BreaksTheGraphAndSaysSo() -> None:
    code = """
import os
os.environ.pop("TORCHDYNAMO_DISABLE", None)
import torch, torch._dynamo, tf_families, tf_compare
module = tf_families.make("mixtral", "MixtralExperts", 16, 8, 4)
given = tf_compare.rows(16, 4, 5, 2)
wanted = module(given.tokens, given.ids, given.weights)
call = lambda x: module(x * 2, given.ids, given.weights) + 1
found = torch.compile(call, backend="eager")(given.tokens / 2)
torch.testing.assert_close(found, wanted + 1)
try:
    torch._dynamo.reset()
    torch.compile(call, backend="eager", fullgraph=True)(given.tokens / 2)
except Exception as error:
    assert "Sluice" in str(error) and "graph break" in str(error), error
else:
    raise AssertionError("no error")
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    environment.pop("TORCHDYNAMO_DISABLE", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=280, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
