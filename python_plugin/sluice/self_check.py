# SPDX-License-Identifier: Apache-2.0
"""Runs forward and backward of a tiny layer in the C library alone, to check that the installation can compute.

torch is not used. The layer has one rank and two experts of two Linears with ReLU. Outputs are compared with plain
Python, and gradients with finite differences of the plain forward.
"""

from __future__ import annotations

from typing import Any

T, M, H, E = 5, 3, 4, 2
_IDS = [0, 1, 1, 0, -1]


def run(library: Any) -> dict[str, Any]:
    """Returns {"gemm", "forward_error", "gradient_error"}; raises the library's errors."""
    ffi, lib = library.ffi, library.lib
    context, moe = ffi.new("sluice_context_t **"), ffi.new("sluice_moe_t **")
    try:
        library.check(lib.sluice_context_create(library.new("context_config"), ffi.NULL, context))
        config = library.new("moe_config")
        config.model_width, config.hidden_width, config.num_experts, config.top_k = M, H, E, 1
        config.dtype, config.activation, config.num_chunks = 1, 1, 2
        library.check(lib.sluice_moe_create(context[0], config, moe))
        errors = _errors(*_both(library, moe[0], _values()))
        stats = ffi.new("sluice_context_stats_t *")
        stats.struct_size = ffi.sizeof(stats[0])
        library.check(lib.sluice_context_get_stats(context[0], 0, stats))
        return {"gemm": ffi.string(stats.gemm).decode(), **errors}
    finally:
        lib.sluice_moe_destroy(moe[0])
        lib.sluice_context_destroy(context[0])


def _errors(output: list[float], gradients: dict[str, list[float]]) -> dict[str, float]:
    values, gradient_error, step = _values(), 0.0, 1e-2
    for name, position in (("x", 4), ("w1", 7), ("w2", 11), ("weights", 2)):
        shifted = []
        for sign in (1, -1):
            moved = {key: list(value) for key, value in values.items()}
            moved[name][position] += sign * step
            # In Python's doubles; the layer is linear in each of these, except where a ReLU changes sign.
            shifted.append(sum(_plain(moved)))
        slope = (shifted[0] - shifted[1]) / (2 * step)
        gradient_error = max(gradient_error, abs(gradients[name][position] - slope))
    forward_error = max(abs(a - b) for a, b in zip(output, _plain(values)))
    return {"forward_error": forward_error, "gradient_error": gradient_error}


def _values() -> dict[str, list[float]]:
    def spread(count: int, factor: int) -> list[float]:
        return [((index * factor + 3) % 17 - 8) / 8 for index in range(count)]

    return {
        "x": spread(T * M, 5),
        "w1": spread(E * H * M, 7),
        "w2": spread(E * M * H, 11),
        "weights": [0.25 * (token + 1) for token in range(T)],
    }


def _plain(values: dict[str, list[float]]) -> list[float]:
    """Computes y[t] = weight[t] * W2 relu(W1 x[t]) with the token's expert; 0 for a dropped token."""
    out: list[float] = []
    for token in range(T):
        expert = _IDS[token]
        if expert < 0:
            out += [0.0] * M
            continue
        x = values["x"][token * M : token * M + M]
        w1 = values["w1"][expert * H * M :]
        w2 = values["w2"][expert * M * H :]
        hidden = [max(0.0, sum(w1[h * M + m] * x[m] for m in range(M))) for h in range(H)]
        out += [values["weights"][token] * sum(w2[m * H + h] * hidden[h] for h in range(H)) for m in range(M)]
    return out


def _both(library: Any, moe: Any, values: dict[str, list[float]]) -> tuple[list[float], dict[str, list[float]]]:
    """Returns the output, and the gradients of its sum."""
    ffi, lib, kept = library.ffi, library.lib, []  # kept: memory that the calls borrow

    def tensors(data: Any, rows: int, columns: int, count: int = 1, integer: bool = False) -> Any:
        array, extent = ffi.new("sluice_tensor_t[]", count), ffi.new("int64_t[]", [rows, columns])
        for number in range(count):
            item = array[number]
            item.data, item.device_type, item.ndim, item.shape = data + number * rows * columns, 1, 2, extent
            item.type_code, item.type_bits, item.type_lanes = 0 if integer else 2, 32, 1
        kept.append((array, extent, data))
        return array

    def params(data: dict[str, Any]) -> Any:
        made = ffi.new("sluice_expert_tensors_t *")
        made.struct_size = ffi.sizeof(made[0])
        made.w1, made.w2 = tensors(data["w1"], H, M, E), tensors(data["w2"], M, H, E)
        return made

    data = {name: ffi.new("float[]", value) for name, value in values.items()}
    out, ones = ffi.new("float[]", T * M), ffi.new("float[]", [1.0] * (T * M))
    grads = {name: ffi.new("float[]", len(value)) for name, value in values.items()}
    given, returned = params(data), params(grads)
    args = library.new("moe_forward_args")
    args.tokens = tensors(data["x"], T, M)
    args.expert_ids = tensors(ffi.new("int32_t[]", _IDS), T, 1, integer=True)
    args.route_weights = tensors(data["weights"], T, 1)
    args.params, args.out_tokens, args.needs_backward = given, tensors(out, T, M), 1
    step = ffi.new("sluice_step_t **")
    library.check(lib.sluice_moe_forward(moe, args, ffi.NULL, step))
    try:
        back = library.new("moe_backward_args")
        back.tokens, back.route_weights, back.params = args.tokens, args.route_weights, args.params
        back.grad_out, back.grad_tokens = tensors(ones, T, M), tensors(grads["x"], T, M)
        back.grad_route_weights, back.grad_params, back.parts = tensors(grads["weights"], T, 1), returned, 3
        library.check(lib.sluice_moe_backward(moe, step[0], back, ffi.NULL))
    finally:
        lib.sluice_step_drop(step[0])
    return list(out), {name: list(value) for name, value in grads.items()}
