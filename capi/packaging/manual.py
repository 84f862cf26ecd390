"""The pages that users of the C ABI read, as HTML: no script, no style sheet, links among themselves."""

from __future__ import annotations

import os
import re

from libraries import ROOT, Failure

PAGES = ("c-abi", "concepts", "glossary", "schedule", "tuning", "environment", "security")
HEAD = '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>Sluice: {title}</title></head>\n<body>\n'


def anchor(heading: str) -> str:
    """As GitHub names a heading, since that is how the pages link to each other."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def target(href: str) -> str | None:
    """Where a link leads in the manual; None: to a page that is not in it."""
    if "://" in href or href.startswith("#"):
        return href
    page, _, fragment = href.partition("#")
    name, suffix = os.path.splitext(page)
    if name not in PAGES or suffix != ".md":
        return None
    return f"{name}.html" + (f"#{fragment}" if fragment else "")


def _without_dead_links(children: list) -> list:
    """The inline tokens of a line; a link that leads nowhere becomes the text that it had."""
    kept, dropped = [], False
    for token in children:
        if token.type == "link_open":
            href = target(token.attrGet("href"))
            dropped = href is None
            if dropped:
                continue
            token.attrSet("href", href)
        elif token.type == "link_close" and dropped:
            dropped = False
            continue
        elif token.type == "image":
            continue
        kept.append(token)
    return kept


def render(text: str) -> str:
    try:
        from markdown_it import MarkdownIt
    except ImportError as error:
        raise Failure(f"{error}: run third_party/setup/setup.sh test, then this with .venv/bin/python") from error
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(re.sub(r"^<!-- .* -->\n", "", text, flags=re.MULTILINE))  # marks of generated tables
    for before, token in zip(tokens, tokens[1:]):
        if token.type == "inline":
            if before.type == "heading_open":
                before.attrSet("id", anchor(token.content))
            token.children = _without_dead_links(token.children)
    title = next(token.content for token in tokens if token.type == "inline")
    return HEAD.format(title=title) + parser.renderer.render(tokens, parser.options, {}) + "</body>\n</html>\n"


def write(folder: str) -> None:
    os.makedirs(folder, exist_ok=True)
    for page in PAGES:
        with open(os.path.join(ROOT, "docs", f"{page}.md")) as file:
            text = file.read()
        with open(os.path.join(folder, f"{page}.html"), "w") as file:
            file.write(render(text))
