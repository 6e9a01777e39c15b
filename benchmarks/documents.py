# SPDX-License-Identifier: Apache-2.0
"""Tables that benchmarks write into documents, between two marker lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path


def table(head: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table with this header and these rows."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def put_between(begin: str, end: str, text: str, document: Path) -> None:
    """Replace the text between the markers, each of which is on a line of its own."""
    before, rest = document.read_text().split(f"{begin}\n")
    document.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")
