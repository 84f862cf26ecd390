# SPDX-License-Identifier: Apache-2.0
"""Loads experts of transformers in 4 or 8 bits without decoding them: Sluice's quantizer, and `sluice.keep_quantised`.

The stacked parameters of experts become PackedStacks before anything is loaded, so that plans of expert parallelism and
fully_shard apply to them. Dense weights of FP8 checkpoints are decoded while they are loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sluice.adapters.torch import Format, check_weights, dequantise, quantise
from sluice.adapters.transformers import NAME
from sluice.adapters.transformers.decoded import SUFFIXES
from sluice.adapters.transformers.packed_stack import PackedStack, is_packed, local
from sluice.errors import InvalidArgument, SluiceError, Unsupported

from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

STACKS = ("gate_up_proj", "up_proj", "down_proj")
FORMATS = ("mxfp4", "fp8", "int8", "int4")


def keep_quantised(config: Any, weight_format: str | None = None, weight_block: int = 0) -> Any:
    """Returns a model's config with which `from_pretrained` keeps experts in 4 or 8 bits.

    weight_format  for a checkpoint in 16 or 32 bits: "mxfp4", "fp8", "int8" or "int4", to which experts are quantised
                   while it is loaded. None: the checkpoint is quantised, and stays as it is
    weight_block   for int8 and int4: how many inputs share a scale; 0: 128
    """
    found = getattr(config, "quantization_config", None)
    original = found.to_dict() if hasattr(found, "to_dict") else copy.deepcopy(found)
    if original is None:
        if weight_format not in FORMATS:
            raise InvalidArgument(
                f"keep_quantised: the checkpoint is not quantised, and weight_format is {weight_format!r}: name one of "
                f"{', '.join(FORMATS)}, to which its experts are quantised while they are loaded"
            )
        how = {"weight_format": weight_format, "weight_block": weight_block, "layout": ""}
    else:
        method = str(getattr(original.get("quant_method"), "value", original.get("quant_method")))
        _check_original(method, original, weight_format)
        how = original if method == NAME else {"weight_format": method, "layout": method, "original": original}
    made = copy.deepcopy(config)
    made.quantization_config = {**how, "quant_method": NAME}
    return made


def _check_original(method: str, original: dict[str, Any], weight_format: str | None) -> None:
    if method not in SUFFIXES:
        raise Unsupported(
            f"keep_quantised: the checkpoint is quantised as {method}; supported are mxfp4 and fp8: load it with "
            "dequantize=True and save_pretrained, and keep that with weight_format"
        )
    if weight_format not in (None, original.get("weight_format", method)):
        raise InvalidArgument(
            f"keep_quantised: weight_format is {weight_format!r}, but the checkpoint is quantised as {method}: leave "
            "weight_format out"
        )
    if method != "fp8":
        return
    block, scheme = original.get("weight_block_size"), original.get("activation_scheme", "dynamic")
    if block is None or list(block) != [128, 128]:
        raise Unsupported(
            f"keep_quantised: weight_block_size of the checkpoint is {block}; supported are blocks of 128 x 128"
        )
    if scheme != "dynamic" or original.get("scale_fmt") not in (None, "float"):
        raise Unsupported(
            f"keep_quantised: the checkpoint has activation_scheme {scheme!r} and scale_fmt "
            f"{original.get('scale_fmt')!r}; supported are weights with f32 scales and activations that are not "
            "quantised"
        )


class SluiceQuantization(QuantizationConfigMixin):
    """Describes the format of experts in a checkpoint.

    layout    "mxfp4" or "fp8": as the checkpoints of that name; "sluice": as save_pretrained writes other formats;
              "": not quantised yet
    original  the checkpoint's own `quantization_config`
    """

    def __init__(
        self,
        weight_format: str = "",
        weight_block: int = 0,
        layout: str = NAME,
        original: dict[str, Any] | None = None,
        quant_method: str = NAME,
        **unknown: Any,
    ) -> None:
        if weight_format not in FORMATS or layout not in ("", *SUFFIXES) or unknown:
            raise InvalidArgument(
                f"quantization_config of {NAME}: weight_format is {weight_format!r} (one of {', '.join(FORMATS)}), "
                f"layout {layout!r}, and unknown are {sorted(unknown)}: load a checkpoint that save_pretrained wrote"
            )
        self.quant_method = quant_method
        self.form = Format(weight_format, weight_block)
        self.layout = layout
        self.original = original
        self.dense: list[str] = []  # modules that an FP8 checkpoint has in 8 bits, and the model does not

    @property
    def saved_layout(self) -> str:
        """Returns the layout that save_pretrained writes."""
        return self.layout or NAME

    def to_dict(self) -> dict[str, Any]:
        """Returns the saved config: the checkpoint's own unless its layout is Sluice's, so that others can read it."""
        if self.original is None:
            how = {"weight_format": self.form.name, "weight_block": self.form.block, "layout": self.saved_layout}
            return {**how, "quant_method": NAME}
        original = copy.deepcopy(self.original)
        if self.dense:
            kept = original.get("modules_to_not_convert") or []
            original["modules_to_not_convert"] = sorted({*kept, *self.dense})
        return original


class _Operation(ConversionOps):
    """Implements operations' common part. With a quantizer transformers does not cast an operation's inputs. Errors
    are raised after loading: transformers would only count an error here, and other ranks would not learn of it."""

    def __init__(self, hf_quantizer: Any) -> None:
        self.hf_quantizer = hf_quantizer

    def __deepcopy__(self, _: Any) -> _Operation:
        return self  # transformers copies its converters for each parameter

    def convert(
        self, input_dict: Any, source_patterns: Any = (), full_layer_name: str = "", model: Any = None, **_: Any
    ) -> dict[str, Any]:
        """Returns the value of one parameter."""
        try:
            found = self.value_of(input_dict, source_patterns, full_layer_name, model)
        except SluiceError as error:
            self.hf_quantizer.refused.append(f"{full_layer_name}: {error.message}")
            found = torch.empty_like(local(model.get_parameter_or_buffer(full_layer_name)), device="cpu")
        return {full_layer_name: found}

    def value_of(self, given: Any, patterns: Any, name: str, model: Any) -> torch.Tensor:
        """See convert."""
        raise NotImplementedError


def _one(value: Any) -> torch.Tensor:
    return value[0] if isinstance(value, list) else value


class Join(_Operation):
    """Makes a PackedStack of codes and scales that are stacked in the checkpoint."""

    def value_of(self, given: Any, patterns: Any, name: str, model: Any) -> torch.Tensor:
        """Returns one PackedStack."""
        ends = SUFFIXES[self.hf_quantizer.quantization_config.layout]
        found = [_one(value) for end in ends for key, value in given.items() if key.endswith(end)]
        if len(found) != 2:
            raise InvalidArgument(f"the checkpoint has {', '.join(given)} alone, and not {' and '.join(ends)}")
        return _fitted(model, name, found[0].flatten(2), found[1])


class Stack(_Operation):
    """Makes a PackedStack of codes and scales of separate experts, as in FP8 checkpoints: gate above up."""

    def value_of(self, given: Any, patterns: Any, name: str, model: Any) -> torch.Tensor:
        """Returns one PackedStack."""
        parts: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for pattern in patterns:
            matrices = given.pop(pattern, [])
            if len({(each.shape, each.dtype) for each in matrices}) > 1:
                raise InvalidArgument(f"{pattern} does not have the same shape and dtype for all experts")
            if matrices:
                parts[pattern.endswith("_scale_inv")].append(torch.stack([each.view(torch.uint8) for each in matrices]))
        if len(parts[0]) != len(parts[1]):
            raise InvalidArgument(f"the checkpoint has {len(parts[0])} weights and {len(parts[1])} scales of it in fp8")
        codes, scales = (part[0] if len(part) == 1 else torch.cat(part, 1) for part in parts)
        return _fitted(model, name, codes, scales.view(torch.float32))


class Dense(_Operation):
    """Makes a dense weight, which is decoded if it is in FP8."""

    def value_of(self, given: Any, patterns: Any, name: str, model: Any) -> torch.Tensor:
        """Returns one weight of the model's dtype."""
        weight, dtype = _one(given["weight"]), model.get_parameter_or_buffer(name).dtype
        if "weight_scale_inv" not in given:
            return weight.to(dtype)
        config = self.hf_quantizer.quantization_config
        config.dense.append(name.removesuffix(".weight"))
        codes, parameter = weight.view(torch.uint8), model.get_parameter_or_buffer(name)
        if hasattr(parameter, "device_mesh"):  # its rows may begin inside of a block whose scale another rank has
            return _decoded_shard(codes, self.hf_quantizer.scales_of(name), parameter).to(dtype)
        scales = _one(given["weight_scale_inv"]).float()
        check_weights(codes, scales, config.form)
        return dequantise(codes, scales, config.form, dtype)


def _decoded_shard(codes: torch.Tensor, scales: torch.Tensor, parameter: Any) -> torch.Tensor:
    """Returns this rank's part of a weight in FP8, decoded with the scales of the whole weight."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    wanted = [-(-size // 128) for size in parameter.shape]
    if list(scales.shape) != wanted:
        raise InvalidArgument(f"scales: has {list(scales.shape)}, want {wanted}")
    shape, begin = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    rows, columns = ((torch.arange(size) + first) // 128 for size, first in zip(shape, begin))
    weight = codes.view(torch.float8_e4m3fn).float() * scales.float()[rows][:, columns]
    if not weight.isfinite().all():
        row, column = (~weight.isfinite()).nonzero()[0].tolist()
        raise InvalidArgument(
            f"row {row + begin[0]}, column {column + begin[1]} is NaN in fp8: make the checkpoint again"
        )
    return weight


class Quantise(_Operation):
    """Quantises a stack that the checkpoint has in 16 or 32 bits."""

    def value_of(self, given: Any, patterns: Any, name: str, model: Any) -> torch.Tensor:
        """Returns one PackedStack."""
        (weight,) = (_one(value) for value in given.values())
        like = local(model.get_parameter_or_buffer(name))
        weight = weight.transpose(1, 2) if like.transposed else weight
        halves = _halves(model, name)
        parts = [quantise(half.contiguous(), like.form) for half in weight.chunk(halves, 1)]
        codes, scales = (part[0] if halves == 1 else torch.cat(part, 1) for part in zip(*parts))
        return _fitted(model, name, codes, scales)


def _halves(model: Any, name: str) -> int:
    """Returns the number of matrices in the rows of a stack. Each of them begins with a new block."""
    module, _, parameter = name.rpartition(".")
    experts = model.get_submodule(module)
    return 2 if parameter == "gate_up_proj" and experts.has_gate and experts.is_concatenated else 1


def _fitted(model: Any, name: str, codes: torch.Tensor, scales: torch.Tensor) -> PackedStack:
    """Makes a stack in the form of the parameter `name`. InvalidArgument if it does not have the parameter's shapes."""
    like = local(model.get_parameter_or_buffer(name))
    for what, found, wanted in (("codes", codes, like.codes), ("scales", scales, like.scales)):
        if tuple(found.shape) != tuple(wanted.shape) or found.element_size() != wanted.element_size():
            raise InvalidArgument(
                f"the checkpoint has {what} {list(found.shape)} of {found.dtype}, and {like.form.name} weights of this "
                f"model have {list(wanted.shape)} of {wanted.dtype}: the checkpoint and config.json do not belong "
                "together, or its blocks have another size"
            )
    return like.like(codes.view(torch.uint8), scales.view(like.scales.dtype))


class SluiceQuantizer(HfQuantizer):
    """Implements the quantizer that transformers' registry has under Sluice's name."""

    quantization_config: SluiceQuantization
    requires_calibration = False
    is_trainable = True

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        # If False, transformers reads one tensor at a time, and does not read ahead.
        self.pre_quantized = bool(quantization_config.layout)
        self.refused: list[str] = []  # errors of parameters of the checkpoint

    def is_serializable(self) -> bool:
        """Returns True: experts are saved in the checkpoint's own bytes."""
        return True

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        """Returns whether a tensor is to be quantised. Called for each tensor of a checkpoint that is not quantised."""
        return is_packed(local(model.get_parameter_or_buffer(param_name)))

    def get_quantize_ops(self) -> Any:
        """Returns the operation for these tensors."""
        return Quantise(self)

    def scales_of(self, name: str) -> torch.Tensor:
        """Returns all scales of a dense weight in FP8."""
        from safetensors import safe_open

        for path in self._files:
            with safe_open(path, "pt") as file:
                found = {key.removeprefix("model."): key for key in file.keys() if key.endswith("_scale_inv")}
                key = found.get(f"{name}_scale_inv".removeprefix("model."))
                if key is not None:
                    return file.get_tensor(key)
        raise InvalidArgument(
            "the checkpoint has its scales under another name, so parts of it cannot be decoded separately"
        )

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **_: Any) -> None:
        self._files = checkpoint_files or []
        found = 0
        for name, module in _experts_of(model):
            _check_runs_here(name, module)
            for stack in _stacks_of(module):
                _replace(name, module, stack, self.quantization_config.form)
                found += 1
        if not found:
            raise Unsupported(
                f"{type(model).__name__} has no stacked experts ({', '.join(STACKS)}) of transformers' "
                "use_experts_implementation: leave out sluice.keep_quantised"
            )

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """Loads codes and scales where the model's converters load weights."""
        layout = self.quantization_config.layout
        if layout == "":
            return weight_conversions
        if layout != "fp8":
            ends = SUFFIXES[layout]
            return [
                *weight_conversions,
                *[WeightConverter([stack + end for end in ends], stack, [Join(self)]) for stack in STACKS],
            ]
        updated = []
        for converter in weight_conversions:
            if _loads_a_stack(converter):
                sources, targets = converter._original_source_patterns, converter._original_target_patterns
                all_sources = [source + end for end in SUFFIXES["fp8"] for source in sources]
                converter = converter.copy(all_sources, list(targets), operations=[Stack(self)])
            updated.append(converter)
        return [*updated, WeightConverter(["weight", "weight_scale_inv"], "weight", [Dense(self)])]

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        _agree(model, lambda: _check_stacks(model, self.refused))
        for _, module in _experts_of(model):
            for stack in _packed_of(module):
                getattr(module, stack).requires_grad_(False)
            _name_as_saved(module, self.quantization_config.saved_layout)
        self._keep_conversions(model)
        _leave_file(model)

    def _keep_conversions(self, model: Any) -> None:
        """Keeps the conversions by which save_pretrained makes the checkpoint's names from those of `state_dict`."""
        kept = []
        for converter in getattr(model, "_weight_conversions", None) or []:
            operations = [type(each) for each in getattr(converter, "operations", ())]
            if Stack in operations:
                kept += self._split_again(model, converter)
            elif not {Join, Dense} & set(operations):
                kept.append(converter)
        model._weight_conversions = kept

    def _split_again(self, model: Any, mine: Any) -> Iterator[Any]:
        from transformers.conversion_mapping import get_model_conversion_mapping

        for stock in get_model_conversion_mapping(model):
            if not _loads_a_stack(stock) or stock._original_target_patterns != mine._original_target_patterns:
                continue
            for end in SUFFIXES["fp8"]:
                sources = [source + end for source in stock._original_source_patterns]
                targets = [target + end for target in stock._original_target_patterns]
                yield stock.copy(sources, targets, operations=[*([] if end else [_AsFloat8()]), *stock.operations])


class _AsFloat8(ConversionOps):
    """Converts codes to float8 when they are saved; before they are uint8, since gloo gathers no float8."""

    def convert(self, input_dict: Any, *_: Any, **__: Any) -> dict[str, Any]:
        """Returns the same bytes as float8."""
        return {name: _one(value).view(torch.float8_e4m3fn) for name, value in input_dict.items()}

    @property
    def reverse_op(self) -> ConversionOps:
        """Returns the same operation, in both directions."""
        return self


def _loads_a_stack(converter: Any) -> bool:
    if not isinstance(converter, WeightConverter):
        return False
    target = converter._original_target_patterns[0].rpartition(".")[2]
    return target in STACKS and all(source.endswith(".weight") for source in converter._original_source_patterns)


def _experts_of(model: Any) -> list[tuple[str, Any]]:
    """Returns modules that transformers' use_experts_implementation decorates."""
    return [(n, m) for n, m in model.named_modules() if isinstance(getattr(m, "is_transposed", None), bool)]


def _stacks_of(module: Any) -> list[str]:
    return [name for name in STACKS if isinstance(module._parameters.get(name), torch.Tensor)]


def _packed_of(module: Any) -> list[str]:
    return [name for name in _stacks_of(module) if is_packed(local(module._parameters[name]))]


def _leave_file(model: Any) -> None:
    """Copies dense weights that are mapped from the checkpoint's file, unless packed ones are too: a single view keeps
    the whole file mapped, and the weights that were quantised stay resident with it."""

    def is_mapped(tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu" and not tensor.untyped_storage().resizable()

    packed = [local(module._parameters[name]) for _, module in _experts_of(model) for name in _packed_of(module)]
    if any(is_mapped(part) for stack in packed for part in (stack.codes, stack.scales)):
        return
    for tensor in (*model.parameters(), *model.buffers()):
        if type(tensor.data) is torch.Tensor and is_mapped(tensor):
            tensor.data = tensor.data.clone()


def _check_runs_here(name: str, module: Any) -> None:
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if chosen != NAME:
        raise InvalidArgument(
            f"{name}: experts_implementation is {chosen!r}, and only Sluice computes with experts in 4 or 8 bits: give "
            f'from_pretrained experts_implementation="{NAME}", or leave out sluice.keep_quantised'
        )


def _replace(name: str, module: Any, stack: str, form: Format) -> None:
    """Replaces a parameter on the meta device by a packed one."""
    weight = module._parameters[stack]
    count, rows, columns = weight.shape
    if module.is_transposed:
        rows, columns = columns, rows
    halves = 2 if stack == "gate_up_proj" and module.has_gate and module.is_concatenated else 1
    if columns % (32 if form.name == "mxfp4" else 8 // form.bits):
        raise Unsupported(
            f"{name}.{stack}: a width of {columns}, and {form.name} needs a multiple of "
            f"{32 if form.name == 'mxfp4' else 2}: choose int8 or fp8"
        )
    across = [form.shape_of_codes(rows // halves, columns), form.shape_of_scales(rows // halves, columns)]
    codes, scales = (torch.empty(count, halves * r, c, dtype=torch.uint8, device="meta") for r, c in across)
    scales = torch.empty(scales.shape, dtype=form.scale_dtype, device="meta")
    packed = PackedStack(codes, scales, form, module.is_transposed, weight.dtype)
    module._parameters[stack] = torch.nn.Parameter(packed, requires_grad=False)


# ---- after loading ----


def _check_stacks(model: Any, refused: list[str]) -> None:
    if refused:
        raise InvalidArgument(refused[0])
    for name, module in _experts_of(model):
        for stack in _packed_of(module):
            packed = local(module._parameters[stack])
            for half in zip(
                *(part.chunk(_halves(model, f"{name}.{stack}"), 1) for part in (packed.codes, packed.scales))
            ):
                try:
                    check_weights(*half, packed.form)
                except InvalidArgument as error:
                    raise InvalidArgument(f"{name}.{stack}: {error.message}") from None


def _agree(model: Any, check: Callable[[], None]) -> None:
    """Runs `check`. An error on one rank is an error on all ranks that share the model."""
    error = None
    try:
        check()
    except SluiceError as found:
        error = found
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        found_by: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(found_by, None if error is None else error.message)
        rank = next((rank for rank, message in enumerate(found_by) if message is not None), None)
        if rank is not None:
            raise InvalidArgument(f"rank {rank}: {found_by[rank]}")
    if error is not None:
        raise error


def _name_as_saved(module: Any, layout: str) -> None:
    """Makes `state_dict` return and `load_state_dict` take plain tensors by the names of the checkpoint."""
    module.__dict__["_sluice_saved_layout"] = layout
    module._register_state_dict_hook(_split)
    module._register_load_state_dict_pre_hook(_join, with_module=True)
    for stack in _packed_of(module):
        for end in SUFFIXES[layout]:
            if end:  # torch's distributed checkpoints read an attribute of each name
                module.__dict__[stack + end] = None


def _split(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    layout = module.__dict__["_sluice_saved_layout"]
    for stack in _packed_of(module):
        whole = state.pop(prefix + stack, None)
        if whole is None:
            continue
        packed = local(whole)
        parts = _as_saved(packed, layout)
        for end, part in zip(SUFFIXES[layout], parts):
            state[prefix + stack + end] = part if packed is whole else _sharded(part, whole)


def _as_saved(packed: PackedStack, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = packed.codes.contiguous(), packed.scales.contiguous()
    if layout == "mxfp4":
        codes = codes.unflatten(2, (-1, 16))
    return codes, scales


def _sharded(part: torch.Tensor, whole: Any) -> Any:
    """Returns a DTensor with the placements of `whole`."""
    from torch.distributed.tensor import DTensor

    shape = torch.Size((whole.shape[0], *part.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, whole.device_mesh, whole.placements, run_check=False, shape=shape, stride=stride)


def _join(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    layout = module.__dict__["_sluice_saved_layout"]
    for stack in _packed_of(module):
        parts = [state.get(prefix + stack + end) for end in SUFFIXES[layout]]
        if any(part is None for part in parts):
            continue
        parameter = module._parameters[stack]
        like = local(parameter)
        codes, scales = (local(part) for part in parts)
        codes = codes.view(torch.uint8) if codes.dim() == 3 else codes.flatten(2)
        packed = like.like(codes, scales.view(like.scales.dtype))
        for end in SUFFIXES[layout]:
            del state[prefix + stack + end]
        state[prefix + stack] = packed if like is parameter else _sharded(packed, parameter)
