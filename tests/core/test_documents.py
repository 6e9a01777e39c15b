# SPDX-License-Identifier: Apache-2.0
"""What documents and docstrings name exists: the tests of the support table, and the files that pages link to."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
PAGES = sorted([*CHECKOUT.glob("*.md"), *CHECKOUT.glob("docs/**/*.md"), *CHECKOUT.glob("recipe/*/README.md")])
LINK = re.compile(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)")
WAY = re.compile(r"[a-z]\w*(?:/\w+)+(?:\.yaml)?")
SHOWN_BY = re.compile(r"\b(tests/[\w/]+\.py|test_\w+\.py)")
MODULES = sorted([*CHECKOUT.glob("recipe/**/*.py"), *CHECKOUT.glob("tests/**/*.py")])
TEST = re.compile(r"`((?:tests/(?:core|settings|integration|e2e)/)?test_\w+\.py)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_every_link_within_the_project_leads_somewhere(page: Path) -> None:
    targets = [(page.parent / target if target else page, anchor) for target, anchor in LINK.findall(page.read_text())]
    assert [str(target) for target, _ in targets if not target.exists()] == []
    anchored = [(target, anchor) for target, anchor in targets if anchor]
    assert [(str(target), anchor) for target, anchor in anchored if anchor not in headings(target)] == []


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def test_every_file_on_the_ways_through_the_house_exists() -> None:
    text = (CHECKOUT / "docs" / "architecture.md").read_text()
    section = text.partition("## Four ways")[2].partition("\n## ")[0]
    files = {name for way in section.split("```")[1::2] for name in WAY.findall(way)}
    assert len(files) > 25
    suffixed = [name if name.endswith(".yaml") else f"{name}.py" for name in sorted(files)]
    folders = (CHECKOUT / "recipe" / "async_engine", CHECKOUT / "recipe")
    assert [name for name in suffixed if not any((folder / name).exists() for folder in folders)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_every_test_that_is_named_exists(page: Path) -> None:
    names = TEST.findall(page.read_text())
    if page.name == "support.md":
        assert len(names) > 40
    missing = [name for name in names if not any(CHECKOUT.glob(name if "/" in name else f"tests/*/{name}"))]
    assert missing == []


def test_every_test_that_a_docstring_names_exists() -> None:
    named = {
        (str(module.relative_to(CHECKOUT)), name)
        for module in MODULES
        for docstring in [ast.get_docstring(ast.parse(module.read_text())) or ""]
        for name in SHOWN_BY.findall(docstring)
    }
    assert len(named) > 150
    assert [
        (module, name)
        for module, name in sorted(named)
        if not any(CHECKOUT.glob(name if "/" in name else f"tests/*/{name}"))
    ] == []
