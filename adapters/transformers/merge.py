# SPDX-License-Identifier: Apache-2.0
"""`sluice merge`: adds a LoRA adapter of PEFT to the weights of its checkpoint, one file of the checkpoint at a time.

At most one file's tensors are in memory. The products are computed in float32 and rounded once to the dtype of the
weight. A checkpoint in 4 or 8 bits becomes one in bfloat16, since merged weights do not fit its format. `config.json`
is written last, so that an interrupted merge is no checkpoint.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sluice.adapters.transformers.decoded import Checkpoint
from sluice.errors import InvalidArgument, Unsupported
from sluice.planning import command

EXAMPLE = """examples:
  sluice merge checkpoint adapter merged

exit status: 0 merged; 2 wrong arguments or files, and nothing is written
"""
_PREFIX = "base_model.model."
_FACTOR = re.compile(rf"^{re.escape(_PREFIX)}(?P<module>.+?)(?P<nested>(\.base_layer)*)\.lora_(?P<which>[AB])\.weight$")
# Keys of an adapter's config with the values that do not change the adapter's results.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None), "lora_bias": (False, None), "bias": ("none", None), "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []), "layer_replication": (None,), "trainable_token_indices": (None, []),
    "alora_invocation_tokens": (None,), "use_qalora": (False, None), "use_bdlora": (False, None, {}),
    "arrow_config": (None,), "velora_config": (None,), "kasa_config": (None,), "monteclora_config": (None,),
}  # fmt: skip
# Names of an expert's matrices in checkpoints with separate experts: of the first half of the stacked rows, of the
# second half, and of a stack that is one matrix.
_HALVES = (("gate_proj", "w1"), ("up_proj", "w3"))
_WHOLE = {"down_proj": ("down_proj", "w2"), "up_proj": ("up_proj", "w1")}

INDEX = "model.safetensors.index.json"
LARGEST_FILE = 4 << 30  # bytes of one file, if decoded weights are larger than the checkpoint's

Update = Callable[[torch.Tensor], torch.Tensor]


class Adapted(NamedTuple):
    """Describes a weight of the model to which an adapter adds `scale * B A`, with separate factors for each expert."""

    name: str  # in the model
    a: str  # keys in the adapter's file
    b: str
    scale: float
    count: int  # of experts; 0: a matrix
    transposed: bool  # the stack is [experts, in, out]


@command.refuses("sluice merge")
def main(words: list[str]) -> int:
    """Runs the command; returns the exit status."""
    parser = command.parser("sluice merge", __doc__, EXAMPLE)
    parser.add_argument("checkpoint", help="a folder with config.json and safetensors")
    parser.add_argument("adapter", help="a folder with adapter_config.json and adapter_model.safetensors")
    parser.add_argument("out", help="a folder that does not exist yet, or is empty")
    options = parser.parse_args(words)
    merge(Path(options.checkpoint), Path(options.adapter), Path(options.out))
    return 0


def merge(checkpoint: Path, adapter: Path, out: Path) -> None:
    """Writes `out`. InvalidArgument and Unsupported name what is wrong before anything is written."""
    from safetensors import safe_open

    settings = _json(checkpoint / "config.json")
    source = Checkpoint(checkpoint, _files_of(checkpoint), settings.get("quantization_config"))
    config = _json(adapter / "adapter_config.json")
    _check(config)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidArgument(f"{out} exists: name a new folder")
    model = _model_of(checkpoint)
    with safe_open(_there(adapter / "adapter_model.safetensors"), "pt") as factors:
        updates: dict[str, Update] = {}
        for one in _adapted(config, factors, model):
            updates.update(_updates(one, factors, {name for names in source.files.values() for name in names}))
        out.mkdir(parents=True, exist_ok=True)
        writer = _Writer(out, source.is_quantised)
        for number, (name, weights) in enumerate(source.files.items(), 1):
            command.progress(f"merge: {name}, {number} of {len(source.files)}")
            with safe_open(checkpoint / name, "pt") as file:
                for key, where in weights.items():
                    weight = source.read(file, key, where, model)
                    dtype = weight.dtype if where.scales is None else torch.bfloat16
                    writer.add(key, _updated(weight, updates.get(key), dtype))
                writer.end_of(name, file.metadata())
    _copy_others(checkpoint, out, source, settings)
    command.progress("")
    print(f"{len(updates)} of {sum(map(len, source.files.values()))} tensors merged into {out}")


def _updated(weight: torch.Tensor, update: Update | None, dtype: torch.dtype) -> torch.Tensor:
    return (weight if update is None else weight.float() + update(weight)).to(dtype).contiguous()


class _Writer:
    """Writes the files of `out`: the checkpoint's, or new ones if it is quantised, since decoded weights are larger."""

    def __init__(self, out: Path, is_quantised: bool) -> None:
        self._out, self._is_quantised = out, is_quantised
        self._tensors: dict[str, torch.Tensor] = {}
        self._files: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Adds the next weight."""
        self._tensors[name] = tensor
        if self._is_quantised and sum(each.nbytes for each in self._tensors.values()) >= LARGEST_FILE:
            self._write({"format": "pt"})

    def end_of(self, name: str, metadata: Any) -> None:
        """Ends a file of the checkpoint, when all of its weights were added."""
        self._write(metadata or {"format": "pt"}, None if self._is_quantised else name)

    def _write(self, metadata: dict[str, str], name: str | None = None) -> None:
        from safetensors.torch import save_file

        if not self._tensors:
            return
        if name is None:
            name = f"model-{len(set(self._files.values())) + 1:05d}.safetensors"
            self._files.update(dict.fromkeys(self._tensors, name))
            index = {"metadata": {}, "weight_map": self._files}
            (self._out / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
        save_file(self._tensors, self._out / name, metadata=metadata)
        self._tensors = {}


def _copy_others(checkpoint: Path, out: Path, source: Checkpoint, settings: dict[str, Any]) -> None:
    """Copies the rest of the folder; config.json last."""
    for path in sorted(checkpoint.iterdir(), key=lambda path: path.name == "config.json"):
        if not path.is_file() or path.name in source.files or (source.is_quantised and path.name == INDEX):
            continue
        if source.is_quantised and path.name == "config.json":
            plain = {key: value for key, value in settings.items() if key != "quantization_config"}
            (out / path.name).write_text(json.dumps({**plain, "dtype": "bfloat16"}, indent=2))
        else:
            shutil.copy2(path, out / path.name)


# ---- the checkpoint ----


def _there(path: Path) -> Path:
    if not path.is_file():
        raise InvalidArgument(f"{path} is missing: name the folder that save_pretrained wrote")
    return path


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(_there(path).read_text())
    except json.JSONDecodeError as error:
        raise InvalidArgument(f"{path} is not JSON: {error}") from None


def _files_of(checkpoint: Path) -> dict[str, list[str]]:
    """Returns the keys of each file of the checkpoint, by the file's name."""
    from safetensors import safe_open

    names = sorted(path.name for path in checkpoint.glob("*.safetensors"))
    if not names:
        raise InvalidArgument(f"{checkpoint} has no .safetensors: load it and save_pretrained")
    found = {}
    for name in names:
        with safe_open(checkpoint / name, "pt") as file:
            found[name] = list(file.keys())
    return found


def _model_of(checkpoint: Path) -> torch.nn.Module:
    """Returns the model without memory, for the names and layouts of its parameters."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(checkpoint)
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    if kind is None:
        raise Unsupported(f"{checkpoint}: this transformers has no class {(config.architectures or ['?'])[0]}")
    with torch.device("meta"):
        return kind._from_config(config)


# ---- the adapter ----


def _check(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise Unsupported(f"the adapter is {config.get('peft_type')}: sluice merge supports LoRA adapters only")
    for key, plain in _PLAIN.items():
        if config.get(key) not in plain:
            raise Unsupported(f"the adapter has {key}={config[key]!r}: merge it with PEFT's merge_and_unload")


def _adapted(config: Mapping[str, Any], factors: Any, model: torch.nn.Module) -> Iterator[Adapted]:
    pairs: dict[tuple[str, int], dict[str, str]] = {}
    for key in factors.keys():
        found = _FACTOR.match(key)
        if found is None:
            raise Unsupported(f"the adapter's {key} is neither A nor B of a LoRA adapter: merge it with PEFT")
        depth = len(found["nested"]) // len(".base_layer")
        pairs.setdefault((found["module"], depth), {})[found["which"]] = key
    modules = dict(model.named_modules())
    for (name, depth), pair in pairs.items():
        if sorted(pair) != ["A", "B"]:
            raise InvalidArgument(f"the adapter of {name} has {' and '.join(pair)} alone")
        if name not in modules:
            raise InvalidArgument(f"the adapter is for {name}, which {type(model).__name__} does not have")
        yield _one(config, factors, name, depth, modules[name], pair)


def _one(
    config: Mapping[str, Any], factors: Any, name: str, depth: int, module: torch.nn.Module, pair: Mapping[str, str]
) -> Adapted:
    rows, columns = (factors.get_slice(pair[which]).get_shape() for which in ("B", "A"))
    targets = config.get("target_parameters") or []
    # PEFT wraps a module once for each target, in the order of its parameters: the first one lies deepest.
    stacked = [p for p, _ in module.named_parameters(recurse=False) if _is_target(f"{name}.{p}", targets)]
    if not stacked:
        parameter, count, transposed = "weight", 0, False
    elif depth < len(stacked):
        parameter = stacked[len(stacked) - 1 - depth]
        tensor = module.get_parameter(parameter)
        count = tensor.shape[0] if tensor.dim() == 3 else 0
        transposed = count > 0 and bool(getattr(module, "is_transposed", False))
    else:
        raise InvalidArgument(f"the adapter has {depth + 1} wrappers of {name}, and its config {len(stacked)} targets")
    full = f"{name}.{parameter}"
    if count == 1:
        raise Unsupported(f"{full} has one expert, for which PEFT has a rule of its own: merge it with PEFT")
    shape = list(module.get_parameter(parameter).shape)
    wanted = [*reversed(shape[-2:])] if transposed else shape[-2:]
    where = full if count else name
    rank = _by_pattern(config.get("rank_pattern") or {}, where, config["r"])
    if [rows[0], columns[1]] != wanted or columns[0] != rows[1] or columns[0] != rank * max(1, count):
        raise InvalidArgument(f"{full} is {shape}, and the adapter has A {columns} and B {rows} of rank {rank}")
    alpha = _by_pattern(config.get("alpha_pattern") or {}, where, config["lora_alpha"])
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return Adapted(full, pair["A"], pair["B"], scale, count, transposed)


def _is_target(name: str, targets: list[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _by_pattern(patterns: Mapping[str, Any], name: str, otherwise: Any) -> Any:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), otherwise)


# ---- the weights that an adapter changes ----


def _updates(one: Adapted, factors: Any, keys: set[str]) -> dict[str, Update]:
    """Returns functions that compute the update of each tensor of the checkpoint, and read factors when called."""
    if one.count == 0:
        if one.name not in keys:
            raise InvalidArgument(f"the checkpoint has no {one.name}, to which the adapter belongs")
        return {one.name: lambda weight: one.scale * _read(factors, one.b) @ _read(factors, one.a)}
    if one.name in keys:
        return {one.name: lambda weight: _stack(one, factors)}
    module, parameter = one.name.rsplit(".", 1)
    found: dict[str, Update] = {}
    for expert in range(one.count):
        if parameter in _WHOLE:
            found[_key(keys, module, expert, _WHOLE[parameter], one.name)] = _part(one, factors, expert, None)
            continue
        for half, names in enumerate(_HALVES):
            found[_key(keys, module, expert, names, one.name)] = _part(one, factors, expert, half)
    return found


def _key(keys: set[str], module: str, expert: int, names: tuple[str, ...], whole: str) -> str:
    """Returns the key of an expert's matrix; model families name it differently."""
    folders = (module, module.replace(".mlp.experts", ".block_sparse_moe.experts"))
    tried = [f"{folder}.{expert}.{name}.weight" for folder in folders for name in names]
    found = [key for key in tried if key in keys]
    if not found:
        raise Unsupported(f"the checkpoint holds {whole} neither as a stack nor as {tried[0]}: merge it with PEFT")
    return found[0]


def _read(factors: Any, key: str) -> torch.Tensor:
    return factors.get_tensor(key).float()


def _split(one: Adapted, factors: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns B [E, out, r] and A [E, r, in] of each expert."""
    a, b = _read(factors, one.a), _read(factors, one.b)
    return b.view(b.shape[0], -1, one.count).permute(2, 0, 1), a.view(one.count, -1, a.shape[1])


def _stack(one: Adapted, factors: Any) -> torch.Tensor:
    b, a = _split(one, factors)
    delta = one.scale * torch.bmm(b, a)
    return delta.transpose(1, 2) if one.transposed else delta


def _part(one: Adapted, factors: Any, expert: int, half: int | None) -> Update:
    def added(weight: torch.Tensor) -> torch.Tensor:
        b, a = _split(one, factors)
        rows = b[expert] if half is None else b[expert].chunk(2)[half]
        return one.scale * rows @ a[expert]

    return added
