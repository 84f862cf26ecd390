# SPDX-License-Identifier: Apache-2.0
"""Writes bindings for Fortran 2018: a module of interoperable types and interfaces.

Handles and untyped memory are type(c_ptr). Structs, numbers and handles that a call writes are passed by reference; an
absent optional argument is NULL, and an array is passed by its first element.
"""

from __future__ import annotations

import textwrap

from abi_table import PRELUDE, Function, Model, Named, Struct, Type

PATH = "fortran/sluice.f90"
SCALARS = {
    **{name: f"integer(c_{name.removeprefix('u')})" for name in PRELUDE},
    **{"char": "character(kind=c_char)", "float": "real(c_float)", "double": "real(c_double)"},
}
ZERO = {"integer": "0", "real": "0", "character": "c_null_char", "type(c_ptr)": "c_null_ptr"}
HEAD = """\
! The C ABI of Sluice. {generated}
!
! Contracts and lifetimes are those of the headers in capi/include/sluice. Arrays are column-major here, so a row-major
! [T, M] of the ABI is an array (M, T). Unsigned numbers of C are signed ones of the same size.
!
! Arguments: handles and void* are type(c_ptr) by value. All other pointers of C are passed by reference: omit an
! optional argument for NULL, pass an array by its first element, and end a text with c_null_char.
! Call the _init of a type for its defaults. A type without an _init begins as zeros with its size.
module sluice
  use, intrinsic :: iso_c_binding
  implicit none
"""
TAIL = """\

contains

  ! Stops the program with the library's message if the call has failed.
  subroutine sluice_check(status)
    integer(c_int32_t), intent(in) :: status
    type(sluice_error_info_t) :: why
    if (status == SLUICE_OK) return
    call sluice_error_info_init(why, c_sizeof(why))
    call sluice_error_last(why)
    print "(a, i0, 1025a)", "status ", status, ": ", why%message(1:findloc(why%message, c_null_char, dim=1) - 1)
    error stop 1
  end subroutine

  ! Describes 32-bit elements. data and shape must have the target attribute and outlive the calls; shape is in the
  ! (row-major) order of the ABI.
  type(sluice_tensor_t) function sluice_tensor(data, shape, type_code) result(it)
    type(c_ptr), intent(in) :: data
    integer(c_int64_t), intent(in), target :: shape(:)
    integer(c_int32_t), intent(in) :: type_code
    it%data = data
    it%device_type = SLUICE_DEVICE_CPU
    it%ndim = size(shape, kind=c_int32_t)
    it%type_code = int(type_code, c_int8_t)
    it%type_bits = 32_c_int8_t
    it%type_lanes = 1_c_int16_t
    it%shape = c_loc(shape)
  end function
end module
"""


def spell(kind: Type) -> str:
    """Returns the Fortran type of a member or a result."""
    if kind.kind == "array":
        return spell(kind.of)
    if kind.kind == "callback":
        return "type(c_funptr)"
    if kind.kind in ("pointer", "handle"):
        return "type(c_ptr)"
    return SCALARS.get(kind.name) or f"type({kind.name})"


def member(one: Named, size: int | None) -> str:
    """Returns a member's declaration with its default. size: the struct's bytes, for its member `struct_size`."""
    kind, name = spell(one.type), one.name
    if one.type.kind == "array":
        name += f"({one.type.count})"
    zero = ZERO.get(kind, "c_null_funptr" if one.type.kind == "callback" else ZERO.get(kind.partition("(")[0]))
    if size is not None:
        zero = str(size)
    return f"{kind} :: {name}" + (f" = {zero}" if zero is not None else "")


def argument(one: Named) -> str:
    kind = one.type
    if kind.kind == "scalar":
        return f"{spell(kind)}, value :: {one.name}"
    if kind.kind == "callback" or kind.points_to("handle") or kind.of == Type("scalar", "void"):
        return f"{spell(kind)}, value :: {one.name}"
    intent = "in" if kind.const else "inout"
    if kind.of == Type("scalar", "char"):
        return f"{spell(kind.of)}, intent({intent}), optional :: {one.name}(*)"
    return f"{spell(kind.of)}, intent({intent}), optional :: {one.name}"


def wrapped(text: str, indent: str) -> list[str]:
    """Wraps a statement to the 132 characters per line that older compilers accept."""
    lines = textwrap.wrap(text, 118, break_long_words=False)
    return [indent + ("  " if i else "") + line + (" &" if i + 1 < len(lines) else "") for i, line in enumerate(lines)]


def interface(function: Function) -> list[str]:
    names = ", ".join(one.name for one in function.parameters)
    kind, result = "subroutine", ""
    if function.result != Type("scalar", "void"):
        kind, result = "function", " result(it)"
    lines = wrapped(f'{kind} {function.name}({names}) bind(c, name="{function.name}"){result}', "    ")
    lines.append("      import")
    lines += [f"      {argument(one)}" for one in function.parameters]
    if result:
        lines.append(f"      {spell(function.result)} :: it")
    return [*lines, f"    end {kind}"]


def struct_type(struct: Struct, m: Model) -> list[str]:
    size = m.size(Type("struct", struct.name))
    lines = ["", f"  type, bind(c) :: {struct.name}"]
    for at, one in enumerate(struct.members):
        lines.append(f"    {member(one, size if at == 0 and struct.grows else None)}")
    return [*lines, "  end type"]


def bindings(m: Model, generated: str) -> str:
    lines = [f"  integer(c_int32_t), parameter :: {name} = {value}" for name, value in m.numbers.items()]
    for struct in m.structs.values():
        lines += struct_type(struct, m)
    lines += ["", "  interface"]
    for function in m.functions.values():
        lines += interface(function)
    lines.append("  end interface")
    return HEAD.format(generated=generated) + "\n".join(lines) + "\n" + TAIL


def layout_program(m: Model) -> str:
    """Returns a program that prints the layout in the format of capi/abi/abi.txt, as this language has it."""
    lines = ["program layout", "  use sluice", "  implicit none"]
    for number, struct in enumerate(m.structs.values()):
        lines.append(f"  type({struct.name}), target :: s{number}")
    for number, struct in enumerate(m.structs.values()):
        at = f"s{number}"
        lines.append(f'  print "(a, i0, a)", "{struct.name}: ", c_sizeof({at}), " bytes"')
        for one in struct.members:
            whole = f"{at}%{one.name}"
            offset = f"address(c_loc({whole})) - address(c_loc({at}))"
            lines.append(f'  print "(a, i0, a, i0, a)", "  ", {offset}, " +", &')
            lines.append(f'    c_sizeof({whole}), " {one.name}"')
    for name in m.constants:
        lines.append(f'  print "(a, i0)", "{name} = ", {name}')
    lines += ["contains", "  integer(c_intptr_t) function address(p)", "    type(c_ptr), intent(in) :: p"]
    return "\n".join([*lines, "    address = transfer(p, 0_c_intptr_t)", "  end function", "end program", ""])
