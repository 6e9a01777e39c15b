# SPDX-License-Identifier: Apache-2.0
"""What documents and docstrings name exists: the tests of the support table, and the files that pages link to."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
PAGES = sorted([*CHECKOUT.glob("*.md"), *CHECKOUT.glob("docs/**/*.md"), *CHECKOUT.glob("recipe/*/README.md")])
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
SHOWN_BY = re.compile(r"\b(tests/[\w/]+\.py|test_\w+\.py)")
MODULES = sorted([*CHECKOUT.glob("recipe/**/*.py"), *CHECKOUT.glob("tests/**/*.py")])
TEST = re.compile(r"`((?:tests/(?:core|settings|integration|e2e)/)?test_\w+\.py)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_every_link_within_the_project_leads_somewhere(page: Path) -> None:
    targets = LINK.findall(page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


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
