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
    layer = _Layer(library)
    try:
        values = _values()
        output, gradients = layer.both(values)
        forward_error = max(abs(a - b) for a, b in zip(output, _plain(values)))
        gradient_error = 0.0
        for name, position in (("x", 4), ("w1", 7), ("w2", 11), ("weights", 2)):
            step = 1e-2
            shifted = []
            for sign in (1, -1):
                moved = {key: list(value) for key, value in values.items()}
                moved[name][position] += sign * step
                # In Python's doubles; the layer is linear in each of these, except where a ReLU changes sign.
                shifted.append(sum(_plain(moved)))
            slope = (shifted[0] - shifted[1]) / (2 * step)
            gradient_error = max(gradient_error, abs(gradients[name][position] - slope))
        return {"gemm": layer.gemm(), "forward_error": forward_error, "gradient_error": gradient_error}
    finally:
        layer.close()


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


class _Layer:
    """Calls the library, and keeps alive all memory that the calls borrow."""

    def __init__(self, library: Any) -> None:
        self._library, self._ffi, self._lib = library, library.ffi, library.lib
        self._kept: list[Any] = []
        self._context = self._moe = None
        context = self._ffi.new("sluice_context_t **")
        library.check(self._lib.sluice_context_create(library.new("context_config"), self._ffi.NULL, context))
        self._context = context[0]
        config = library.new("moe_config")
        config.model_width, config.hidden_width, config.num_experts, config.top_k = M, H, E, 1
        config.dtype, config.activation, config.num_chunks = 1, 1, 2
        moe = self._ffi.new("sluice_moe_t **")
        library.check(self._lib.sluice_moe_create(self._context, config, moe))
        self._moe = moe[0]

    def both(self, values: dict[str, list[float]]) -> tuple[list[float], dict[str, list[float]]]:
        """Returns the output, and the gradients of its sum."""
        ffi, lib = self._ffi, self._lib
        data = {name: ffi.new("float[]", value) for name, value in values.items()}
        out, ones = ffi.new("float[]", T * M), ffi.new("float[]", [1.0] * (T * M))
        grads = {name: ffi.new("float[]", len(value)) for name, value in values.items()}
        ids = ffi.new("int32_t[]", _IDS)
        args = self._library.new("moe_forward_args")
        args.tokens = self._tensor(data["x"], T, M)
        args.expert_ids = self._tensor(ids, T, 1, integer=True)
        args.route_weights = self._tensor(data["weights"], T, 1)
        args.params = self._params(data)
        args.out_tokens = self._tensor(out, T, M)
        args.needs_backward = 1
        step = ffi.new("sluice_step_t **")
        self._library.check(lib.sluice_moe_forward(self._moe, args, ffi.NULL, step))
        try:
            back = self._library.new("moe_backward_args")
            back.tokens, back.route_weights, back.params = args.tokens, args.route_weights, args.params
            back.grad_out = self._tensor(ones, T, M)
            back.grad_tokens = self._tensor(grads["x"], T, M)
            back.grad_route_weights = self._tensor(grads["weights"], T, 1)
            back.grad_params = self._params(grads)
            back.parts = 3
            self._library.check(lib.sluice_moe_backward(self._moe, step[0], back, ffi.NULL))
        finally:
            lib.sluice_step_drop(step[0])
        return list(out), {name: list(value) for name, value in grads.items()}

    def gemm(self) -> str:
        """Returns the name of the GEMM implementation."""
        stats = self._ffi.new("sluice_context_stats_t *")
        stats.struct_size = self._ffi.sizeof(stats[0])
        self._library.check(self._lib.sluice_context_get_stats(self._context, 0, stats))
        return self._ffi.string(stats.gemm).decode()

    def close(self) -> None:
        """Releases the library's objects."""
        if self._moe is not None:
            self._lib.sluice_moe_destroy(self._moe)
        if self._context is not None:
            self._lib.sluice_context_destroy(self._context)
        self._moe = self._context = None

    def _tensor(self, data: Any, rows: int, columns: int, integer: bool = False) -> Any:
        array = self._ffi.new("sluice_tensor_t[]", 1)
        self._fill(array[0], data, rows, columns, integer)
        self._kept.append(array)
        return array

    def _fill(self, item: Any, data: Any, rows: int, columns: int, integer: bool) -> None:
        extent = self._ffi.new("int64_t[]", [rows, columns])
        item.data, item.device_type, item.ndim, item.shape = data, 1, 2, extent
        item.type_code, item.type_bits, item.type_lanes = 0 if integer else 2, 32, 1
        self._kept += [extent, data]

    def _params(self, data: dict[str, Any]) -> Any:
        params = self._ffi.new("sluice_expert_tensors_t *")
        params.struct_size = self._ffi.sizeof(params[0])
        for name, rows, columns in (("w1", H, M), ("w2", M, H)):
            array = self._ffi.new("sluice_tensor_t[]", E)
            for expert in range(E):
                self._fill(array[expert], data[name] + expert * rows * columns, rows, columns, False)
            self._kept.append(array)
            setattr(params, name, array)
        self._kept.append(params)
        return params
