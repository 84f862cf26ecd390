# SPDX-License-Identifier: Apache-2.0
"""Reads the public C headers into one table, a list for each kind of declaration, from which the bindings of all
languages are written."""

from __future__ import annotations

import dataclasses
import re

import declarations
from pycparser import c_ast, c_parser

PRELUDE = {
    "int8_t": "signed char",
    "uint8_t": "unsigned char",
    "int16_t": "short",
    "uint16_t": "unsigned short",
    "int32_t": "int",
    "uint32_t": "unsigned int",
    "int64_t": "long",
    "uint64_t": "unsigned long",
    "size_t": "unsigned long",
    "uintptr_t": "unsigned long",
}
SCALARS = (*PRELUDE, "char", "float", "double", "void")
BYTES = {"char": 1, "int8_t": 1, "uint8_t": 1, "int16_t": 2, "uint16_t": 2, "int32_t": 4, "uint32_t": 4, "float": 4}
RELEASES = ("_destroy", "_drop")
NUMBER = re.compile(r"^(0[xX][0-9a-fA-F]+|\d+)[uUlL]*$")


@dataclasses.dataclass(frozen=True)
class Type:
    """Describes a C type. kind: "scalar", "struct", "handle", "callback", with a name; "pointer", "array" with `of`."""

    kind: str
    name: str = ""
    of: Type | None = None
    const: bool = False  # of a pointer: it points to const
    count: int = 0
    alias: str = dataclasses.field(default="", compare=False)  # the typedef's name in the header

    def points_to(self, kind: str) -> bool:
        return self.kind == "pointer" and self.of is not None and self.of.kind == kind


@dataclasses.dataclass(frozen=True)
class Named:
    """Describes a member of a struct, or a parameter of a function."""

    name: str
    type: Type


@dataclasses.dataclass(frozen=True)
class Function:
    """Describes a function, or the type of a callback."""

    name: str
    result: Type
    parameters: tuple[Named, ...]
    has_status: bool = False  # it returns a sluice_status_t


@dataclasses.dataclass(frozen=True)
class Struct:
    name: str
    members: tuple[Named, ...]

    @property
    def grows(self) -> bool:
        return self.members[0].name == "struct_size"


@dataclasses.dataclass
class Model:
    macros: dict[str, int] = dataclasses.field(default_factory=dict)
    constants: dict[str, int] = dataclasses.field(default_factory=dict)  # of enums; listed in capi/abi/abi.txt
    handles: dict[str, str | None] = dataclasses.field(default_factory=dict)  # opaque type: its release function
    callbacks: dict[str, Function] = dataclasses.field(default_factory=dict)
    structs: dict[str, Struct] = dataclasses.field(default_factory=dict)
    functions: dict[str, Function] = dataclasses.field(default_factory=dict)
    experimental: set[str] = dataclasses.field(default_factory=set)  # functions marked with SLUICE_EXPERIMENTAL

    @property
    def numbers(self) -> dict[str, int]:
        return {**self.macros, **self.constants}

    def init_of(self, struct: Struct) -> str | None:
        """Returns the name of the function that sets the struct's defaults, or None."""
        name = struct.name[: -len("_t")] + "_init"
        return name if name in self.functions else None

    def alignment(self, kind: Type) -> int:
        if kind.kind == "array":
            return self.alignment(kind.of)
        if kind.kind == "struct":
            return max(self.alignment(member.type) for member in self.structs[kind.name].members)
        return self.size(kind)

    def size(self, kind: Type) -> int:
        """Returns the bytes of a type; pointers have 8, as on all supported platforms."""
        if kind.kind == "array":
            return kind.count * self.size(kind.of)
        if kind.kind != "struct":
            return BYTES.get(kind.name, 8)
        end = 0
        for member in self.structs[kind.name].members:
            end = -(-end // self.alignment(member.type)) * self.alignment(member.type) + self.size(member.type)
        return -(-end // self.alignment(kind)) * self.alignment(kind)


class _Reader:
    def __init__(self, macros: dict[str, int]) -> None:
        self.model = Model(macros=macros)
        self.aliases: dict[str, c_ast.Node] = {}
        self.structs: set[str] = set()  # tags that have members, before they are listed

    def value(self, node: c_ast.Node) -> int:
        if isinstance(node, c_ast.Constant):
            return int(NUMBER.match(node.value).group(1), 0)
        if isinstance(node, c_ast.ID):
            return self.model.numbers[node.name]
        if isinstance(node, c_ast.UnaryOp) and node.op == "-":
            return -self.value(node.expr)
        if isinstance(node, c_ast.BinaryOp):
            left, right = self.value(node.left), self.value(node.right)
            return {"+": left + right, "-": left - right, "*": left * right, "<<": left << right, "|": left | right}[
                node.op
            ]
        raise ValueError(f"no template knows the constant expression at {node.coord}")

    def enumerators(self, node: c_ast.Enum) -> None:
        following = 0
        for one in node.values.enumerators:
            following = following if one.value is None else self.value(one.value)
            self.model.constants[one.name] = following
            following += 1

    def function(self, name: str, node: c_ast.FuncDecl) -> Function:
        listed = node.args.params if node.args is not None else []
        parameters = [Named(one.name, self.type(one.type)) for one in listed if one.name is not None]
        result = node.type
        plain = isinstance(result, c_ast.TypeDecl) and isinstance(result.type, c_ast.IdentifierType)
        has_status = plain and result.type.names == ["sluice_status_t"]
        return Function(name, self.type(result), tuple(parameters), has_status)

    def type(self, node: c_ast.Node, owner: str = "") -> Type:
        """Reads a type. owner: the name for a callback that is declared in place."""
        if isinstance(node, c_ast.PtrDecl):
            if isinstance(node.type, c_ast.FuncDecl):
                self.model.callbacks[owner] = self.function(owner, node.type)
                return Type("callback", owner)
            return Type("pointer", of=self.type(node.type), const="const" in getattr(node.type, "quals", []))
        if isinstance(node, c_ast.ArrayDecl):
            return Type("array", of=self.type(node.type), count=self.value(node.dim))
        if isinstance(node, c_ast.TypeDecl):
            return self.type(node.type)
        if isinstance(node, c_ast.Struct):
            return self.named(f"{node.name[: -len('_s')]}_t")
        if isinstance(node, c_ast.IdentifierType):
            return self.named(" ".join(node.names))
        raise ValueError(f"no template knows what is declared at {node.coord}")

    def named(self, name: str) -> Type:
        if name in SCALARS:
            return Type("scalar", name)
        if name in self.model.callbacks:
            return Type("callback", name)
        if name in self.aliases:
            return dataclasses.replace(self.type(self.aliases[name]), alias=name)
        return Type("struct" if name in self.structs else "handle", name)

    def typedef(self, name: str, node: c_ast.Node) -> None:
        if isinstance(node, c_ast.PtrDecl) and isinstance(node.type, c_ast.FuncDecl):
            self.model.callbacks[name] = self.function(name, node.type)
        elif isinstance(node, c_ast.TypeDecl) and isinstance(node.type, c_ast.Struct):
            self.struct(name, node.type)
        else:
            self.aliases[name] = node

    def struct(self, name: str, node: c_ast.Struct) -> None:
        if node.name != f"{name[: -len('_t')]}_s":
            raise ValueError(f"{name}: the tag of a struct is its name with _s")
        if node.decls is None:
            self.model.handles[name] = None
            return
        self.structs.add(name)
        stem = name[: -len("_t")]
        members = [Named(one.name, self.type(one.type, f"{stem}_{one.name}_fn_t")) for one in node.decls]
        self.model.structs[name] = Struct(name, tuple(members))

    def read(self, tree: c_ast.FileAST) -> Model:
        for one in tree.ext:
            if isinstance(one, c_ast.Typedef) and one.name not in PRELUDE:
                self.typedef(one.name, one.type)
            elif isinstance(one, c_ast.Decl) and isinstance(one.type, c_ast.Enum):
                self.enumerators(one.type)
            elif isinstance(one, c_ast.Decl) and isinstance(one.type, c_ast.FuncDecl):
                self.model.functions[one.name] = self.function(one.name, one.type)
            elif not isinstance(one, c_ast.Typedef):
                raise ValueError(f"no template knows what is declared at {one.coord}")
        for name in self.model.handles:
            releases = [name[: -len("_t")] + suffix for suffix in RELEASES]
            self.model.handles[name] = next((one for one in releases if one in self.model.functions), None)
        return self.model


def read(include_dir: str) -> Model:
    macros, text = declarations.read(include_dir)
    prelude = "".join(f"typedef {plain} {name};\n" for name, plain in PRELUDE.items())
    model = _Reader(macros).read(c_parser.CParser().parse(prelude + text))
    model.experimental = declarations.experimental(include_dir)
    return model
