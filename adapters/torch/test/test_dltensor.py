# SPDX-License-Identifier: Apache-2.0
"""Tests that the C ABI takes a `DLTensor*` as it is: the tensors that torch and NumPy export by `__dlpack__`."""

import ctypes

import pytest
import torch
from layer_cases import reference
from sluice._library import load

T, M, H, E, K = 6, 4, 5, 3, 2
IDS = [[0, 2], [1, 0], [1, -1], [-1, -1], [0, 1], [2, 1]]

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_name = ctypes.pythonapi.PyCapsule_GetName
_name.restype, _name.argtypes = ctypes.c_char_p, [ctypes.py_object]
# The offset of the DLTensor in a capsule of that name: a DLManagedTensor begins with it; the versioned one has version,
# manager_ctx, deleter and flags before it (DLPack 1.x, dlpack.h).
OFFSETS = {b"dltensor": 0, b"dltensor_versioned": 32}


class Borrowed:
    """The DLTensor of a real capsule; the capsule stays unconsumed and frees its tensor with this object."""

    def __init__(self, tensor, **how):
        self._capsule = tensor.__dlpack__(**how)
        self.name = _name(self._capsule)
        self.pointer = load().ffi.cast("sluice_tensor_t *", _pointer(self._capsule, self.name) + OFFSETS[self.name])


def forward(given, how):
    """Runs E experts of two Linears with ReLU. Passes every tensor by its DLTensor, and the experts' tensors, which are
    in arrays, by a copy of it. Returns the names of the capsules."""
    library = load()
    ffi, lib = library.ffi, library.lib
    context, moe = ffi.new("sluice_context_t **"), ffi.new("sluice_moe_t **")
    library.check(lib.sluice_context_create(library.new("context_config"), ffi.NULL, context))
    config = library.new("moe_config")
    config.model_width, config.hidden_width, config.num_experts, config.top_k = M, H, E, K
    config.dtype, config.activation = ffi.integer_const("SLUICE_DTYPE_F32"), 1
    library.check(lib.sluice_moe_create(context[0], config, moe))
    of_call = [Borrowed(given[name], **how) for name in ("tokens", "ids", "weights", "out")]
    experts = [[Borrowed(tensor, **how) for tensor in given[name]] for name in ("w1", "w2")]
    arrays = [ffi.new("sluice_tensor_t[]", [each.pointer[0] for each in tensors]) for tensors in experts]
    params = ffi.new("sluice_expert_tensors_t *")
    params.struct_size = ffi.sizeof(params[0])
    params.w1, params.w2 = arrays
    args = library.new("moe_forward_args")
    args.tokens, args.expert_ids, args.route_weights, args.out_tokens = (each.pointer for each in of_call)
    args.params = params
    library.check(lib.sluice_moe_forward(moe[0], args, ffi.NULL, ffi.NULL))
    lib.sluice_moe_destroy(moe[0])
    lib.sluice_context_destroy(context[0])
    return {each.name for each in (*of_call, *experts[0], *experts[1])}


def values():
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    return {
        "tokens": draw(T, M),
        "ids": torch.tensor(IDS, dtype=torch.int32),
        "weights": draw(T, K).abs(),
        "w1": draw(E, H, M),
        "w2": draw(E, M, H),
        "out": torch.full((T, M), float("nan")),
    }


def plain(given):
    experts = [{"w1": w1, "w2": w2} for w1, w2 in zip(given["w1"], given["w2"])]
    return reference(given["tokens"], given["ids"], given["weights"], experts, "relu")


def spread(tensor):
    """Returns the same values where neither rows nor matrices follow each other: every second row and a wider pitch."""
    wide = torch.full((2 * tensor.shape[0], *tensor.shape[1:-1], tensor.shape[-1] + 3), 7).to(tensor.dtype)
    view = wide[::2, ..., : tensor.shape[-1]]
    view.copy_(tensor)
    assert not view.is_contiguous()
    return view


def turned(tensor):
    """Returns the same matrices stored by columns."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


FORMS = {"contiguous": lambda given: given, "strided": lambda given: {k: spread(v) for k, v in given.items()}}
FORMS["by columns"] = lambda given: {**given, "w1": turned(given["w1"]), "w2": turned(given["w2"])}
FORMS["i64 ids, K-major"] = lambda given: {**given, "ids": given["ids"].long().t().contiguous().t()}


@pytest.mark.parametrize("how", [{}, {"max_version": (1, 0)}], ids=["dltensor", "dltensor_versioned"])
@pytest.mark.parametrize("host", ["torch", "numpy"])
@pytest.mark.parametrize("form", FORMS)
def test_DLTensor_OfARealCapsule_IsTakenAsItIs(form, host, how):
    given = FORMS[form](values())
    wanted = plain(given)
    arrays = given if host == "torch" else {name: tensor.numpy() for name, tensor in given.items()}
    assert forward(arrays, how) == {b"dltensor_versioned" if how else b"dltensor"}
    torch.testing.assert_close(given["out"], wanted)  # numpy's array shares its memory


def test_DLTensor_WithAByteOffset_IsReadFromThere():
    """Neither host sets the offset; others do (DLPack wants `data` aligned there)."""
    given = values()
    wanted = plain(given)
    wide = torch.cat([torch.full((1, M), float("nan")), given["tokens"]])
    borrowed = Borrowed(wide[1:])
    borrowed.pointer.data = load().ffi.cast("void *", wide.data_ptr())
    borrowed.pointer.byte_offset = M * wide.element_size()

    class Moved:
        def __dlpack__(self, **_):
            return borrowed._capsule

    forward({**given, "tokens": Moved()}, {})
    torch.testing.assert_close(given["out"], wanted)
