# SPDX-License-Identifier: Apache-2.0
"""Writes bindings for Rust: names as in C, a `Default` for each struct, and an owner for each handle."""

from __future__ import annotations

from abi_table import Function, Model, Type

PATH = "rust/sluice.rs"
SCALARS = {
    **{f"{sign}int{bits}_t": f"{sign or 'i'}{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{"size_t": "usize", "uintptr_t": "usize", "char": "c_char", "float": "f32", "double": "f64", "void": "c_void"},
}
KEYWORDS = {"type", "match", "ref", "move", "in", "use", "fn", "loop", "where", "box", "final", "override"}
HEAD = """\
//! The C ABI of Sluice. {generated}
//!
//! Names, contracts and lifetimes are those of the headers in capi/include/sluice. A struct's `default()` is what its
//! `_init` writes; without an `_init`, zeros and its size. Needs Rust 1.63 or newer.
#![allow(dead_code, non_camel_case_types)]
use std::os::raw::{{c_char, c_void}};
use std::{{ffi::CStr, fmt, mem, ptr}};

"""
TAIL = """\

/// The error of a call.
#[derive(Debug, Clone)]
pub struct Error {
    pub status: i32,
    pub message: String,
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        let name = unsafe { CStr::from_ptr(sluice_status_name(self.status)) };
        write!(out, "{}: {}", name.to_string_lossy(), self.message)
    }
}

impl std::error::Error for Error {}

/// Turns the status of this thread's last call into a result.
pub fn check(status: i32) -> Result<(), Error> {
    if status == SLUICE_OK {
        return Ok(());
    }
    let mut why = sluice_error_info_t::default();
    unsafe { sluice_error_last(&mut why) };
    let message = unsafe { CStr::from_ptr(why.message.as_ptr()) };
    Err(Error { status, message: message.to_string_lossy().into_owned() })
}

impl sluice_tensor_t {
    /// Row-major 32-bit elements on the CPU. Memory and shape are borrowed until the last call that uses it.
    pub fn of<X>(data: &mut [X], type_code: i32, shape: &[i64]) -> Self {
        assert_eq!((data.len() as i64, mem::size_of::<X>()), (shape.iter().product(), 4));
        let mut it = Self::default();
        it.data = data.as_mut_ptr() as *mut c_void;
        it.shape = shape.as_ptr() as *mut i64;
        (it.device_type, it.ndim) = (SLUICE_DEVICE_CPU, shape.len() as i32);
        (it.type_code, it.type_bits, it.type_lanes) = (type_code as u8, 32, 1);
        it
    }
}

macro_rules! owner {
    ($name:ident, $handle:ident, $release:ident) => {
        #[doc = concat!("Owns a `", stringify!($handle), "`, or nothing.")]
        pub struct $name(*mut $handle);
        impl $name {
            pub fn none() -> $name { $name(ptr::null_mut()) }
            pub fn raw(&self) -> *mut $handle { self.0 }
            /// For an `out_` argument. Releases the present handle.
            pub fn out(&mut self) -> *mut *mut $handle {
                *self = $name::none();
                &mut self.0
            }
        }
        impl Drop for $name {
            fn drop(&mut self) { unsafe { $release(self.0) } }
        }
        /// Any thread may use and release it, but only one at a time.
        unsafe impl Send for $name {}
    };
}
"""


def camel(name: str) -> str:
    """Returns the owner's name: sluice_local_group_t becomes LocalGroup."""
    return "".join(part.capitalize() for part in name[len("sluice_") : -len("_t")].split("_"))


def word(name: str) -> str:
    return f"r#{name}" if name in KEYWORDS else name


def spell(kind: Type) -> str:
    if kind.kind == "pointer":
        return f"*{'const' if kind.const else 'mut'} {spell(kind.of)}"
    if kind.kind == "array":
        return f"[{spell(kind.of)}; {kind.count}]"
    return SCALARS.get(kind.name, kind.name)


def signature(function: Function) -> str:
    parameters = ", ".join(f"{word(one.name)}: {spell(one.type)}" for one in function.parameters)
    result = "" if function.result == Type("scalar", "void") else f" -> {spell(function.result)}"
    return f"({parameters}){result}"


def bindings(m: Model, generated: str) -> str:
    lines = [f"pub const {name}: i32 = {value};" for name, value in m.numbers.items()]
    for name in m.handles:
        lines += ["", "#[repr(C)]", f"pub struct {name} {{", "    _opaque: [u8; 0],", "}"]
    lines.append("")
    for name, callback in m.callbacks.items():
        lines.append(f'pub type {name} = Option<unsafe extern "C" fn{signature(callback)}>;')
    for struct in m.structs.values():
        lines += ["", "#[repr(C)]", "#[derive(Clone, Copy)]", f"pub struct {struct.name} {{"]
        lines += [f"    pub {word(member.name)}: {spell(member.type)}," for member in struct.members]
        lines += ["}", f"impl Default for {struct.name} {{", "    fn default() -> Self {"]
        init = m.init_of(struct)
        mutable = "mut " if init or struct.grows else ""
        lines.append(f"        let {mutable}it: Self = unsafe {{ mem::zeroed() }};")
        if init:
            lines.append(f"        unsafe {{ {init}(&mut it, mem::size_of::<Self>()) }};")
        elif struct.grows:
            lines.append("        it.struct_size = mem::size_of::<Self>();")
        lines += ["        it", "    }", "}"]
    lines += ["", 'extern "C" {']
    lines += [f"    pub fn {name}{signature(function)};" for name, function in m.functions.items()]
    lines.append("}")
    owners = [f"owner!({camel(name)}, {name}, {release});" for name, release in m.handles.items() if release]
    return HEAD.format(generated=generated) + "\n".join(lines) + "\n" + TAIL + "\n".join(owners) + "\n"


def layout_program(m: Model) -> str:
    """Returns a program that prints the layout in the format of capi/abi/abi.txt, as this language has it."""
    lines = ["mod sluice;", "use sluice::*;", "fn bytes<T>(_: *const T) -> usize { std::mem::size_of::<T>() }", ""]
    lines.append("fn main() {")
    for struct in m.structs.values():
        lines.append(f"    let it = std::mem::MaybeUninit::<{struct.name}>::zeroed();")
        lines.append("    let it = it.as_ptr();")
        lines.append(f'    println!("{struct.name}: {{}} bytes", bytes(it));')
        for member in struct.members:
            lines.append(f"    let at = unsafe {{ std::ptr::addr_of!((*it).{word(member.name)}) }};")
            lines.append(f'    println!("  {{}} +{{}} {member.name}", at as usize - it as usize, bytes(at));')
    lines += [f'    println!("{name} = {{}}", {name});' for name in m.constants]
    return "\n".join([*lines, "}", ""])
