"""What the READMEs point at is there, and the algorithm table leaves no overlay out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in (
    "README.md", "examples/algorithms/README.md", "docs/security.md", "CONTRIBUTING.md", "CHANGELOG.md",
)]  # fmt: skip
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def links(page: Path) -> list[tuple[str, str]]:
    """(text, target) of every link to a file of ours."""
    return [(text, target) for text, target in LINK.findall(page.read_text()) if "://" not in target]


def names_in(file: Path) -> set[str]:
    """Functions and classes at the top level of a module."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, kinds)}


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    found = links(page)
    assert found
    for text, target in found:
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), f"{page}: [{text}]({target})"
        assert not anchor or anchor in anchors(file), f"{page}: [{text}]({target})"
        if file.suffix == ".py" and text.startswith("`"):
            assert text.strip("`") in names_in(file), f"{page}: {text} is not in {target}"


def table() -> list[list[str]]:
    section = PAGES[0].read_text().split("\n## Algorithms\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows[1:]]


def test_the_table_has_every_overlay_with_function_paper_and_test():
    rows = table()
    overlays = [LINK.fullmatch(row[1]).group(2) for row in rows]
    assert sorted(overlays) == sorted(
        str(path.relative_to(ROOT)) for path in (ROOT / "examples" / "algorithms").glob("*.yaml")
    )
    for name, overlay, function, paper, test in rows:
        assert name and overlay and paper
        assert all(target.startswith("megatron_ac2/") for _, target in LINK.findall(function)) and "](" in function
        assert all(target.startswith("tests/") for _, target in LINK.findall(test)) and "](" in test


def test_an_overlay_s_paper_is_the_table_s():
    for _, overlay, _, paper, _ in table():
        text = (ROOT / LINK.fullmatch(overlay).group(2)).read_text()
        for identifier in re.findall(r"\[(\d{4}\.\d{5})\]", paper):
            assert f"arXiv {identifier}" in text, f"{overlay}: {identifier}"


def test_a_name_that_is_not_there_would_be_seen(tmp_path):
    file = tmp_path / "module.py"
    file.write_text("def one():\n    def inner(): pass\nclass Two:\n    def method(self): pass\n")
    assert names_in(file) == {"one", "Two"}
