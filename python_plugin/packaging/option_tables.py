# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of options in docs from the table in sluice.options.

    .venv/bin/python python_plugin/packaging/option_tables.py [DOCS]

Each table is between a line `<!-- options: NAME -->` and a line `<!-- end -->`. The script prints the changed pages.
`test_Manual_HasTheTablesOfThePackage` fails if a page's tables differ from those of the installed package.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from sluice.options import CONFIGURE, MODEL, PATHS, TABLE, Row

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"(?<=^<!-- options: )(\w+)( -->\n)(.*?)(?=^<!-- end -->$)", re.MULTILINE | re.DOTALL)


def _table(*lines: tuple[str, ...]) -> str:
    head, *rows = (f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([head, "|" + "---|" * len(lines[0]), *rows]) + "\n"


def _manual(rows: dict[str, Row]) -> str:
    cells = ((f"`{path}`", row.values, row.unset, row.meaning) for path, row in rows.items())
    return _table(("key", "values", "default", "meaning"), *cells)


def _of(key: str) -> dict[str, Row]:
    return {f"{key}.{name}": row for name, row in TABLE[key].parts.items()}


def _in_transformers(row: Row) -> str:
    if row.transformers is not None:
        return row.transformers
    if CONFIGURE not in row.may_come_from:
        return "refused"
    return "the same" if MODEL in row.may_come_from else "not in a model's config"


def _origins() -> Iterator[tuple[str, ...]]:
    for path, row in PATHS.items():
        yield f"`{path}`", "yes" if MODEL in row.may_come_from else "no", row.why.removeprefix("it ")


TABLES: dict[str, Callable[[], str]] = {
    "section": lambda: _manual(TABLE),
    "tuner": lambda: _manual(_of("tuner")),
    "pipeline": lambda: _manual(_of("pipeline")),
    "placement": lambda: _manual(_of("placement")),
    "transformers": lambda: _table(
        ("key", "in transformers"), *((f"`{key}`", _in_transformers(row)) for key, row in TABLE.items())
    ),
    "origins": lambda: _table(("key", "from a model's config", "what it can do"), *_origins()),
}


def written(page: str) -> str:
    """Returns the text of a page with the correct tables."""
    return BLOCK.sub(lambda found: f"{found[1]}{found[2]}{TABLES[found[1]]()}", page)


def pages(docs: Path) -> Iterator[tuple[Path, str, str]]:
    """Yields (page, its text, the correct text) of the pages with tables."""
    for path in sorted(docs.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if BLOCK.search(text):
            yield path, text, written(text)


def main() -> None:
    docs = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs"
    for path, text, wanted in pages(docs):
        if text != wanted:
            path.write_text(wanted, encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main()
