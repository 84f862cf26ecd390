# SPDX-License-Identifier: Apache-2.0
"""Copies the pages of docs/ that users of the C ABI read in addition to `man`; links among these pages stay."""

from __future__ import annotations

import os
import re

import tree
from libraries import ROOT

PAGES = ("c-abi", "concepts", "glossary", "schedule", "tuning", "environment", "security")
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")


def leads_somewhere(href: str) -> bool:
    """Returns whether a link leads to a page of the manual or to the web."""
    name, suffix = os.path.splitext(href.partition("#")[0])
    return "://" in href or href.startswith("#") or (name in PAGES and suffix == ".md")


def render(text: str) -> str:
    """Returns a page without pictures, without marks of generated tables, and with links to other files as text."""
    text = re.sub(r"^(?:<!-- .* -->|!\[.*\]\(.*\))\n", "", text, flags=re.MULTILINE)
    return LINK.sub(lambda found: found[0] if leads_somewhere(found[2]) else found[1], text)


def write(folder: str) -> None:
    for page in PAGES:
        with open(os.path.join(ROOT, "docs", f"{page}.md")) as file:
            tree.write(os.path.join(folder, f"{page}.md"), render(file.read()))
