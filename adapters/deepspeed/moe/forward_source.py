# SPDX-License-Identifier: Apache-2.0
"""Reads the forward of a simple expert class, to know its mathematics without running it.

It understands straight-line code that consists of `self.layer(...)`, known activations, names and, for gated experts,
one product:

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))

Anything else (a branch, an attribute that is no module, a helper, a decorator) is not understood, and the host's module
is then called. The source shows side effects and conditions on state, which a trace would miss.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from types import FunctionType
from typing import Any

import torch
from sluice.adapters.common import activations
from torch import nn

Found = tuple[str, "str | None", str, str]  # paths of w1, w3, w2; activation


class _NotUnderstood(Exception):
    """Has the reason as its message."""


def read(expert: nn.Module) -> Found | str:
    """Returns (w1, w3, w2, activation) of an expert's forward, or why the forward is not understood."""
    cls = type(expert)
    if cls.__module__.startswith("torch.nn."):
        return f"a {cls.__name__} is not Linear - activation - Linear"
    for name in ("__call__", "__getattr__"):
        if getattr(cls, name) is not getattr(nn.Module, name):
            return f"{cls.__name__} has its own {name}"
    if cls.__getattribute__ is not object.__getattribute__:
        return f"{cls.__name__} has its own __getattribute__"
    try:
        argument, expressions, function = _parsed(cls.forward)
        reader = _Reader(expert, argument, function)
        # All expressions are read, also those of local names that the result does not use.
        return _match([reader.value(expression) for expression in expressions][-1])
    except _NotUnderstood as error:
        return f"the forward of {cls.__name__} is not one that Sluice knows ({error})"


@functools.lru_cache(maxsize=256)
def _parsed(forward: Any) -> tuple[str, list[ast.expr], FunctionType]:
    """Returns the argument's name, all assigned expressions followed by the returned one, and the function."""
    if type(forward) is not FunctionType or forward.__closure__ is not None or hasattr(forward, "__wrapped__"):
        raise _NotUnderstood("decorated, or not a plain method")
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(forward))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        raise _NotUnderstood("its source is not at hand") from None
    if not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
        raise _NotUnderstood("decorated, or not a plain method")
    arguments = definition.args
    if len(arguments.args) != 2 or arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.posonlyargs:
        raise _NotUnderstood("it takes more than one tensor")
    own, argument = (item.arg for item in arguments.args)
    if own != "self":
        raise _NotUnderstood("its first argument is not called self")
    # Every local name stands for one expression, which replaces the name where it is used.
    names: dict[str, ast.expr] = {}
    expressions: list[ast.expr] = []
    for statement in definition.body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # the docstring
        if isinstance(statement, ast.Return) and statement.value is not None:
            return argument, [*expressions, _Inline(names).visit(statement.value)], forward
        if not (
            isinstance(statement, ast.Assign)
            and len(statement.targets) == 1
            and isinstance(statement.targets[0], ast.Name)
        ):
            raise _NotUnderstood(f"line {statement.lineno} of it is a {type(statement).__name__}")
        expressions.append(_Inline(names).visit(statement.value))
        names = {**names, statement.targets[0].id: expressions[-1]}
    raise _NotUnderstood("it returns nothing")


class _Inline(ast.NodeTransformer):
    def __init__(self, names: dict[str, ast.expr]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._names.get(node.id, node)


class _Reader:
    """Turns the expression into nested tuples: ("x",), ("linear", path, v), ("act", name, v), ("mul", v, v)."""

    def __init__(self, expert: nn.Module, argument: str, function: FunctionType) -> None:
        self._expert, self._argument, self._function = expert, argument, function

    def value(self, node: ast.expr) -> tuple[Any, ...]:
        if isinstance(node, ast.Name):
            if node.id == self._argument:
                return ("x",)
            raise _NotUnderstood(f"the name {node.id}")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            return ("mul", self.value(node.left), self.value(node.right))
        if isinstance(node, ast.Call):
            return self._call(node)
        raise _NotUnderstood(f"a {type(node).__name__}")

    def _call(self, node: ast.Call) -> tuple[Any, ...]:
        if len(node.args) != 1 or isinstance(node.args[0], ast.Starred):
            raise _NotUnderstood("a call with other than one argument")
        inner = self.value(node.args[0])
        target = node.func
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
            if node.keywords:
                raise _NotUnderstood(f"self.{target.attr} with keywords")
            return self._own(target.attr, inner)
        function = self._global(target)
        name = activations.of_function(function)
        if name is None:
            raise _NotUnderstood(f"a call of {ast.unparse(target)}")
        return ("act", self._with_keywords(name, node.keywords), inner)

    def _own(self, name: str, inner: tuple[Any, ...]) -> tuple[Any, ...]:
        module = self._expert._modules.get(name)
        if module is None or name in self._expert.__dict__ or hasattr(type(self._expert), name):
            raise _NotUnderstood(f"self.{name} is no module")
        activation = activations.of_module(module)
        if activation is not None:
            return ("act", activation, inner)
        if type(module) is nn.Identity or (type(module) is nn.Dropout and module.p == 0):
            return inner
        return ("linear", name, inner)

    def _global(self, node: ast.expr) -> Any:
        """Returns the object of `F.gelu`, `torch.relu` or a bare imported name, in the globals of the forward."""
        if isinstance(node, ast.Name):
            return self._function.__globals__.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self._global(node.value)
            # Only attributes of modules are read: an attribute of anything else could run code.
            return getattr(base, node.attr, None) if type(base) is type(torch) else None
        return None

    @staticmethod
    def _with_keywords(name: str, keywords: list[ast.keyword]) -> str:
        for keyword in keywords:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            if name == "gelu" and keyword.arg == "approximate" and value in ("none", "tanh"):
                name = "gelu_tanh" if value == "tanh" else "gelu"
            else:
                raise _NotUnderstood(f"the keyword {keyword.arg}")
        return name


def _match(value: tuple[Any, ...]) -> Found:
    def linear_of_x(part: tuple[Any, ...]) -> str | None:
        return part[1] if part[0] == "linear" and part[2] == ("x",) else None

    if value[0] != "linear":
        raise _NotUnderstood("it does not end with a Linear")
    w2, inner = value[1], value[2]
    if inner[0] == "linear" and linear_of_x(inner):
        return linear_of_x(inner), None, w2, "identity"  # type: ignore[return-value]
    if inner[0] == "act" and (w1 := linear_of_x(inner[2])):
        return w1, None, w2, inner[1]
    if inner[0] == "mul":
        for gate, up in ((inner[1], inner[2]), (inner[2], inner[1])):
            if gate[0] == "act" and (w1 := linear_of_x(gate[2])) and (w3 := linear_of_x(up)):
                return w1, w3, w2, gate[1]
    raise _NotUnderstood("not Linear - activation - Linear")
