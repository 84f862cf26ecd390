# SPDX-License-Identifier: Apache-2.0
"""Writes bindings for Go: structs with exported members, a function for each call, errors as `error`.

cgo checks the calls against the header. By cgo's rules a struct may point only to C memory, which `New` and `Slice`
allocate.
"""

from __future__ import annotations

from abi_table import PRELUDE, Function, Model, Named, Type

PATH = "go/sluice.go"
MODULE = "module sluice\n\ngo 1.19\n"  # go/go.mod
SCALARS = {
    **{name: name.removesuffix("_t") for name in PRELUDE},
    **{"size_t": "uintptr", "char": "byte", "float": "float32", "double": "float64"},
}
KEYWORDS = {"type", "range", "map", "func", "chan", "select", "go", "defer", "var", "package", "interface", "text"}
HEAD = """\
// Package sluice is the C ABI of Sluice. {generated}
//
// Contracts and lifetimes are those of the headers in capi/include/sluice. Names are those of C without sluice_,
// capitalised as in Go. Memory that the library reads through a struct must be C memory: New, Slice and Text allocate
// it, Free releases it. A callback is the address of a C function. A handle that is an argument may be nil where the
// header allows NULL.
//
// The compiler finds headers and library by CGO_CFLAGS and CGO_LDFLAGS, or by an installed libsluice-dev.
// Needs Go 1.19 or newer.
package sluice

/*
#cgo LDFLAGS: -lsluice
#include <stdlib.h>
#include <sluice/sluice.h>
*/
import "C"

import (
	"runtime"
	"unsafe"
)

"""
TAIL = """
// Error is the error of a call.
type Error struct {
	Status  int32
	Message string
}

func (e *Error) Error() string { return StatusName(e.Status) + ": " + e.Message }

// Locks the goroutine to its thread, because the library keeps the last error for each thread.
func checked(call func() C.sluice_status_t) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	status := int32(call())
	if status == OK {
		return nil
	}
	var why C.sluice_error_info_t
	C.sluice_error_info_init(&why, C.size_t(unsafe.Sizeof(why)))
	C.sluice_error_last(&why)
	return &Error{status, C.GoString(&why.message[0])}
}

// Slice allocates count zeroed elements in C memory, which must not contain Go pointers. Release it with Free(&it[0]).
func Slice[T any](count int) []T {
	var one T
	return unsafe.Slice((*T)(C.calloc(C.size_t(count), C.size_t(unsafe.Sizeof(one)))), count)
}

// Free releases memory of New, Slice and Text.
func Free[T any](memory *T) { C.free(unsafe.Pointer(memory)) }

// NewTensor describes row-major 32-bit elements in C memory. Release it with Free(it.Shape) and Free(it).
func NewTensor[T any](data []T, typeCode uint8, shape ...int64) *Tensor {
	it, lengths := New[Tensor](), Slice[int64](len(shape))
	copy(lengths, shape)
	it.Data, it.Shape, it.Ndim = unsafe.Pointer(&data[0]), &lengths[0], int32(len(shape))
	it.DeviceType, it.TypeCode, it.TypeBits, it.TypeLanes = DEVICE_CPU, typeCode, 32, 1
	return it
}

// Text allocates a copy with a terminating zero in C memory.
func Text(text string) *byte { return (*byte)(unsafe.Pointer(C.CString(text))) }
"""


def camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_") if part)


def exported(name: str) -> str:
    """Returns the Go name: sluice_moe_config_t becomes MoeConfig."""
    stem = name[len("sluice_") :]
    return camel(stem[: -len("_t")] if stem.endswith("_t") else stem)


def constant(name: str) -> str:
    """Returns the Go name: SLUICE_E_STATE becomes E_STATE. Capitals keep constants distinct from types."""
    return name[len("SLUICE_") :]


def parameter(name: str) -> str:
    small = camel(name)
    small = small[0].lower() + small[1:]
    return small + "_" if small in KEYWORDS else small


def spell(kind: Type) -> str:
    if kind.kind == "callback" or kind.of == Type("scalar", "void"):
        return "unsafe.Pointer"
    if kind.kind == "pointer":
        return f"*{spell(kind.of)}"
    if kind.kind == "array":
        return f"[{kind.count}]{spell(kind.of)}"
    return SCALARS.get(kind.name) or exported(kind.name)


def native(kind: Type) -> str:
    """Returns cgo's name of the type."""
    if kind.alias:
        return f"C.{kind.alias}"
    if kind.of == Type("scalar", "void"):
        return "unsafe.Pointer"
    if kind.kind == "pointer":
        return f"*{native(kind.of)}"
    return f"C.{kind.name}"


def handed_over(one: Named) -> str:
    name, kind = parameter(one.name), native(one.type)
    if kind == "unsafe.Pointer":
        return name
    if one.type.kind == "pointer" and not one.type.alias:
        return f"({kind})(unsafe.Pointer({name}))"
    return f"{kind}({name})"


def wrapper(function: Function, types: set[str]) -> list[str]:
    stem = exported(function.name)
    stem = f"Get{stem}" if stem in types else stem
    listed = ", ".join(f"{parameter(one.name)} {spell(one.type)}" for one in function.parameters)
    call = f"C.{function.name}({', '.join(map(handed_over, function.parameters))})"
    if function.has_status:
        body = ["\treturn checked(func() C.sluice_status_t {", f"\t\treturn {call}", "\t})"]
        return ["", f"func {stem}({listed}) error {{", *body, "}"]
    if function.result == Type("scalar", "void"):
        return ["", f"func {stem}({listed}) {{", f"\t{call}", "}"]
    if function.result.kind == "pointer":
        return ["", f"func {stem}({listed}) string {{", f"\treturn C.GoString({call})", "}"]
    result = spell(function.result)
    return ["", f"func {stem}({listed}) {result} {{", f"\treturn {result}({call})", "}"]


def aligned(rows: list[tuple[str, str]]) -> list[str]:
    """Aligns columns as gofmt does."""
    width = max(len(name) for name, _ in rows)
    return [f"\t{name.ljust(width)} {rest}" for name, rest in rows]


def bindings(m: Model, generated: str) -> str:
    lines = ["const ("]
    lines += aligned([(constant(name), f"= {value}") for name, value in m.numbers.items()])
    lines.append(")")
    for name in m.handles:
        lines += [
            "",
            f"// {exported(name)} is a handle: only pointers to it exist.",
            f"type {exported(name)} struct {{",
        ]
        lines += ["\t_ [0]byte", "}"]
    for struct in m.structs.values():
        lines += ["", f"// {exported(struct.name)} is {struct.name}.", f"type {exported(struct.name)} struct {{"]
        lines += [*aligned([(camel(one.name), spell(one.type)) for one in struct.members]), "}"]
    types = {exported(name) for name in (*m.handles, *m.structs)}
    for function in m.functions.values():
        lines += wrapper(function, types)
    lines += ["", "// New allocates a struct with its defaults in C memory. Release it with Free."]
    lines += ["func New[T any]() *T {", "\tit := &Slice[T](1)[0]", "\tswitch s := any(it).(type) {"]
    for struct in m.structs.values():
        init, name = m.init_of(struct), exported(struct.name)
        if init:
            lines += [f"\tcase *{name}:", f"\t\t{exported(init)}(s, unsafe.Sizeof(*s))"]
        elif struct.grows:
            lines += [f"\tcase *{name}:", "\t\ts.StructSize = unsafe.Sizeof(*s)"]
    lines += ["\t}", "\treturn it", "}"]
    return HEAD.format(generated=generated) + "\n".join(lines) + "\n" + TAIL


def layout_program(m: Model) -> str:
    """Returns a program that prints the layout in the format of capi/abi/abi.txt, as this language has it."""
    lines = ["package main", "", 'import "fmt"', 'import "unsafe"', 'import "sluice"', "", "func main() {"]
    for struct in m.structs.values():
        lines += ["\t{", f"\t\tvar s sluice.{exported(struct.name)}"]
        lines.append(f'\t\tfmt.Printf("{struct.name}: %d bytes\\n", unsafe.Sizeof(s))')
        for one in struct.members:
            at = f"s.{camel(one.name)}"
            lines.append(f'\t\tfmt.Printf("  %d +%d {one.name}\\n", unsafe.Offsetof({at}), unsafe.Sizeof({at}))')
        lines.append("\t}")
    lines += [f'\tfmt.Printf("{name} = %d\\n", sluice.{constant(name)})' for name in m.constants]
    return "\n".join([*lines, "}", ""])
