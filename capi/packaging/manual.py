# SPDX-License-Identifier: Apache-2.0
"""The pages that users of the C ABI read beside those of `man`: as they are written, with links among themselves."""

from __future__ import annotations

import os
import re

import tree
from libraries import ROOT

PAGES = ("c-abi", "concepts", "glossary", "schedule", "tuning", "environment", "security")
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")


def leads_somewhere(href: str) -> bool:
    """Whether a link leads to a page of the manual, or out of it to the web."""
    name, suffix = os.path.splitext(href.partition("#")[0])
    return "://" in href or href.startswith("#") or (name in PAGES and suffix == ".md")


def render(text: str) -> str:
    """A page without pictures, marks of generated tables, and links to what is not packed, of which the text stays."""
    text = re.sub(r"^(?:<!-- .* -->|!\[.*\]\(.*\))\n", "", text, flags=re.MULTILINE)
    return LINK.sub(lambda found: found[0] if leads_somewhere(found[2]) else found[1], text)


def write(folder: str) -> None:
    for page in PAGES:
        with open(os.path.join(ROOT, "docs", f"{page}.md")) as file:
            tree.write(os.path.join(folder, f"{page}.md"), render(file.read()))
