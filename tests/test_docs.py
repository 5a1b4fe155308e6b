"""The pages are true of the code: options, commands, links. `make docs` makes a site of them."""

from __future__ import annotations

import re
import runpy
import subprocess
from functools import cache
from pathlib import Path

import pytest
import typer

from core.cli import app

ROOT = Path(__file__).resolve().parents[1]
_TRACKED = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
PAGES = [ROOT / name for name in _TRACKED.split()]
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND = re.compile(r"(?:^|[\s`/(])core (?P<name>[a-z]+)(?P<options>[^`|#\n]*)")
OTHERS_OPTIONS = {"--system-site-packages", "--headless", "--folder", "--once", "--index-url", "--pip-args"}
"""Of pip, pipx and core-node; --once is told of make's ARGS."""


@cache
def options(command: str) -> frozenset[str]:
    """Those of its own commands, if it has some, included."""
    found = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    parameters = [one for each in (found, *getattr(found, "commands", {}).values()) for one in each.params]
    return frozenset(name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts))


@cache
def commands() -> frozenset[str]:
    return frozenset(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_page_of_commands_is_what_the_commands_say() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "_commands.py"))["page"]()
    assert page == (ROOT / "docs" / "commands.md").read_text(encoding="utf-8"), "run make docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_and_options_that_are_shown_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for shown in COMMAND.finditer(text):
        name = shown["name"]
        if name in commands():
            given = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", shown["options"]))
            assert given <= options(name), shown[0]
    known = frozenset().union(*map(options, commands())) | OTHERS_OPTIONS
    for option in re.findall(r"`(--[a-z][a-z-]+)", text):
        assert option in known, option


def test_every_page_has_its_place_on_the_site() -> None:
    site = (ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8")
    shown = [page for page in PAGES if page.parent in (ROOT, ROOT / "docs")]
    assert [page.name for page in shown if f": {page.relative_to(ROOT).as_posix()}\n" not in site] == []
