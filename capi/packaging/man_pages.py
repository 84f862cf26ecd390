# SPDX-License-Identifier: Apache-2.0
"""Writes one manual page for each public function from its header: `man sluice_moe_forward`.

A page has the declaration, the comment above it, and the structs that the function takes, with their comments.
"""

from __future__ import annotations

import gzip
import os
import re
import time

import libraries
import tree

DECLARATION = re.compile(r"^(?:SLUICE_API|SLUICE_EXPORT)\b[^;]*?\b(sluice_\w+)\([^;]*\);", re.MULTILINE)
STRUCT = re.compile(r"^typedef struct \w+ \{\n.*?^\} (sluice_\w+_t);", re.MULTILINE | re.DOTALL)
HANDLE = re.compile(r"^typedef struct \w+ \w+;", re.MULTILINE)
COMMENT = re.compile(r"/\*.*?\*/\n\Z", re.DOTALL)
SECTION = re.compile(r"/\* -{3,}")
TERM = re.compile(r"(\S(?:.*?\S)?)(?: {2,}| \t)(\S.*)")  # `name   what it is`, as comments list arguments
INIT = "Sets every member of the struct to its default. struct_size: the sizeof of the struct in the calling program."


def _headers() -> dict[str, str]:
    folder = os.path.join(libraries.INCLUDE, "sluice")
    texts = {}
    for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name)) as file:
            texts[name] = file.read()
    return texts


def _comment_before(text: str, end: int) -> str:
    """Returns the comment that ends at this place; several declarations in a row share the comment above the first."""
    before = text[:end]
    while True:
        found = COMMENT.search(before[max(before.rfind("/*"), 0) :])
        if found:
            return "" if SECTION.match(found.group()) else found.group()
        row = [*DECLARATION.finditer(before), *HANDLE.finditer(before)]
        row = [match for match in row if before[match.end() :] == "\n"]
        if not row:
            return ""
        before = before[: row[0].start()]


def _lines(comment: str) -> list[str]:
    """Returns the lines of a comment without `/*`, `*` and `*/`."""
    inside = comment.strip().removeprefix("/*").removesuffix("*/").strip()
    return [re.sub(r"^ \* ?", "", line).rstrip() for line in inside.split("\n")]


def _escape(text: str) -> str:
    text = text.replace("\\", "\\e")
    return f"\\&{text}" if text[:1] in (".", "'") else text


def _describe(lines: list[str]) -> list[str]:
    """Returns the text in roff: running text is filled, a list of terms with descriptions becomes tagged paragraphs."""
    out, in_list = [], False
    for line in lines:
        term = TERM.fullmatch(line.strip()) if re.match(r" {0,4}\S", line) else None
        if not line.strip():
            out.append(".PP")
            in_list = False
        elif term:
            out += [".TP", f".B {_escape(term[1])}", _escape(term[2])]
            in_list = True
        else:
            if in_list and not line.startswith(" "):
                out.append(".PP")
                in_list = False
            out.append(_escape(line.strip()))
    return [line for at, line in enumerate(out) if line != ".PP" or (0 < at < len(out) - 1)]


def _as_it_is(text: str) -> list[str]:
    return [".nf", *[_escape(line) for line in text.split("\n")], ".fi"]


def _first_sentence(lines: list[str]) -> str:
    text = " ".join(line.strip() for line in lines)
    return re.split(r"(?<=[a-z0-9)\]])[.:;](?:\s|$)", text)[0][:150].rstrip(".")


def _declare(text: str) -> str:
    """Returns the declaration without macros such as SLUICE_API, with its lines aligned again."""
    marks = re.compile(r"\bSLUICE_(?:API|EXPORT|EXPERIMENTAL)\s+")
    first, *rest = marks.sub("", text).split("\n")
    return "\n".join([first, *[" " * (first.index("(") + 1) + line.strip() for line in rest]])


def _page(
    name: str, header: str, declaration: str, lines: list[str], structs: list[str], others: list[str], date: str
) -> str:
    out = [f'.TH {name} 3 "{date}" "Sluice {libraries.version()}" "Sluice C ABI"', ".SH NAME"]
    out += [f"{name} \\- {_escape(_first_sentence(lines))}", ".SH SYNOPSIS", f".B #include <sluice/{header}>", ".PP"]
    out += [*_as_it_is(_declare(declaration)), ".PP", "Link with \\-lsluice.", ".SH DESCRIPTION"]
    out += _describe(lines)
    if "SLUICE_EXPERIMENTAL" in declaration:
        out += [".PP", "Experimental: a later release may change or remove this function."]
    if "sluice_status_t" in declaration.split("(")[0]:
        out += [".SH RETURN VALUE", "SLUICE_OK, or the status of an error, of which"]
        out += [".BR sluice_error_last (3)", "has the details."]
    if structs:
        out += [".SH STRUCTS", *_as_it_is("\n\n".join(structs))]
    if others:
        out += [".SH SEE ALSO", *[f".BR {other} (3){',' if other != others[-1] else ''}" for other in others]]
    return "\n".join(out) + "\n"


def pages(date: str) -> dict[str, str]:
    """Returns {function: text of its page}."""
    texts, made = _headers(), {}
    structs = {found.group(1): found.group() for text in texts.values() for found in STRUCT.finditer(text)}
    for header, text in texts.items():
        found = [(match.group(1), match) for match in DECLARATION.finditer(text)]
        for name, match in found:
            declaration = match.group()
            lines = _lines(_comment_before(text, match.start()))
            if not any(lines) and name.endswith("_init"):
                lines = [INIT]
            taken = [
                structs[kind] for kind in dict.fromkeys(re.findall(r"\bsluice_\w+_t\b", declaration)) if kind in structs
            ]
            made[name] = _page(
                name, header, declaration, lines, taken, [other for other, _ in found if other != name], date
            )
    return made


def write(folder: str, seconds: int, is_packed: bool) -> None:
    """Writes all pages. is_packed: compressed by gzip, as in Debian packages."""
    date = time.strftime("%Y-%m-%d", time.gmtime(seconds))
    os.makedirs(folder, exist_ok=True)
    for name, text in pages(date).items():
        if is_packed:
            with open(os.path.join(folder, f"{name}.3.gz"), "wb") as file:
                file.write(gzip.compress(text.encode(), 9, mtime=0))
        else:
            tree.write(os.path.join(folder, f"{name}.3"), text)
