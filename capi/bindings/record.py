# SPDX-License-Identifier: Apache-2.0
"""Writes the C ABI as one text, capi/abi/abi.txt, so that a diff shows each change that callers must be compiled for.

The text has sizes of structs, offset, size and type of members, values of constants, the types of callbacks and
functions, and the names that are experimental. capi/test/layout compares all but the last with the headers by a C
compiler. A line has as many members, constants of one prefix, or experimental names as fit.
"""

from __future__ import annotations

import itertools
import re
import textwrap

from abi_table import Function, Model, Type

PATH = "capi/abi/abi.txt"
HEAD = """\
# The C ABI, as `.venv/bin/python capi/bindings/generate.py` reads it from the headers. ABI.md says what may change.
"""


def spell(kind: Type) -> str:
    """Returns the C spelling of an unnamed declaration of the type. Aliases such as sluice_status_t are resolved."""
    if kind.kind == "array":
        return f"{spell(kind.of)}[{kind.count}]"
    if kind.kind != "pointer":
        return kind.name
    if kind.const:
        return f"{spell(kind.of)} const*" if kind.of.kind == "pointer" else f"const {spell(kind.of)}*"
    return f"{spell(kind.of)}*"


def _declaration(name: str, function: Function) -> str:
    parameters = ", ".join(f"{spell(one.type)} {one.name}" for one in function.parameters)
    return f"{spell(function.result)} {name}({parameters or 'void'});"


def _reach(m: Model, function: Function, found: set[str]) -> None:
    """Adds the structs and callbacks that the function names, and what these name."""
    for kind in (function.result, *(one.type for one in function.parameters)):
        _reach_type(m, kind, found)


def _reach_type(m: Model, kind: Type, found: set[str]) -> None:
    while kind.of is not None:
        kind = kind.of
    if kind.name in found:
        return
    if kind.name in m.callbacks:
        found.add(kind.name)
        _reach(m, m.callbacks[kind.name], found)
    elif kind.name in m.structs:
        found.add(kind.name)
        for member in m.structs[kind.name].members:
            _reach_type(m, member.type, found)


def experimental(m: Model) -> list[str]:
    """Returns the functions that the headers mark, and the structs and callbacks that only those functions use."""
    kept: set[str] = set()
    used: set[str] = set()
    for name, function in m.functions.items():
        _reach(m, function, used if name in m.experimental else kept)
    return sorted(m.experimental | (used - kept))


def _wrapped(start: str, between: str, parts: list[str]) -> list[str]:
    """Returns lines that begin with `start`, each with as many parts as fit. A new last part moves no other."""
    whole = between.join(part.replace(" ", "\0") for part in parts)
    lines = textwrap.wrap(whole, 120 - len(start), break_long_words=False, break_on_hyphens=False)
    return [start + line.replace("\0", " ").removesuffix(between.strip()) for line in lines]


def text(m: Model) -> str:
    lines = []
    for struct in m.structs.values():
        lines.append(f"{struct.name}: {m.size(Type('struct', struct.name))} bytes")
        end, members = 0, []
        for member in struct.members:
            align, size = m.alignment(member.type), m.size(member.type)
            end = -(-end // align) * align
            members.append(f"{end} +{size} {member.name}: {spell(member.type)}")
            end += size
        lines += _wrapped("  ", "; ", members)
    for _, group in itertools.groupby(m.constants.items(), lambda constant: constant[0].split("_")[:2]):
        lines += _wrapped("", "; ", [f"{name} = {value}" for name, value in group])
    lines += [f"typedef {_declaration(f'(*{name})', callback)}" for name, callback in m.callbacks.items()]
    lines += [_declaration(name, function) for name, function in m.functions.items()]
    lines += _wrapped("experimental ", " ", experimental(m))
    return HEAD + "\n".join(lines) + "\n"


def entries(record: str) -> dict[tuple[str, str], str]:
    """Returns {(struct or other name, member or ""): its line}."""
    found, struct = {}, ""
    for line in record.splitlines():
        if line.startswith("  "):
            for part in line.strip().split("; "):
                found[struct, part.split()[2].rstrip(":")] = part
        elif size := re.fullmatch(r"(\w+): \d+ bytes", line):
            struct = size.group(1)
            found[struct, ""] = line
        elif re.match(r"\w+ = ", line):
            found.update({(part.split()[0], ""): part for part in line.split("; ")})
        elif not line.startswith(("#", "experimental ")):
            found[re.sub(r".*\b(sluice_\w+)\)?\(.*", r"\1", line), ""] = line
    return found


def functions(record: str) -> set[str]:
    """Returns the names of all functions."""
    return set(re.findall(r"^(?!typedef|#)[^(]*\b(sluice_\w+)\(", record, re.M))


def experimental_names(record: str) -> set[str]:
    return set(" ".join(re.findall(r"^experimental (.*)$", record, re.M)).split())


def breaks(before: str, after: str) -> list[str]:
    """Returns the lines of a release's record that the later record breaks: all lines that changed or are missing.

    Exceptions: a larger size of a struct with a member struct_size, reserved members that got a name, and names that
    were experimental in the release.
    """
    old, new = entries(before), entries(after)
    free = experimental_names(before)
    gone = []
    for key, line in old.items():
        if new.get(key) == line or key[0] in free or (key[1].startswith("reserved") and (key[0], "") in new):
            continue
        grown = key in new and (key[0], "struct_size") in old and re.search(r": (\d+) bytes$", line)
        if not grown or int(new[key].split()[1]) < int(grown.group(1)):
            gone.append(f"{key[0]}: {line}" if key[1] else line)
    return gone
