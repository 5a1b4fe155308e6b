"""The page in a real browser, over real sockets, with a fake engine: Chromium by Playwright, skipped without them.

CORE_TEST_PICTURES names a folder that keeps pictures, CORE_TEST_AXE a file axe.min.js that looks for barriers.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from core.gateway.settings import ApiSettings
from core.interfaces.engine import ClusterStatus, Delta

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
AXE, PICTURES = os.environ.get("CORE_TEST_AXE"), os.environ.get("CORE_TEST_PICTURES")
EVIL = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"
TABLE, CODE = "| a | b |\n|---|---|\n| 1 | 2 |", "```python\ndef f(): pass\n```"
TEXT = "\n\n".join((f"**Bold** {EVIL}", TABLE, CODE, "[x](javascript:alert(1))"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None or importlib.util.find_spec("playwright") is None, reason="no browser here"),
]


@contextmanager
def browsing(url: str, **options: Any) -> Iterator[Any]:
    """A page of a browser that has never been there; what it complains of fails the test."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_context(**options).new_page()
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if "Content Security" in said.text else None)
        page.goto(url)
        yield page
        browser.close()
    assert complaints == []


@pytest.fixture
def url(address: tuple[str, int]) -> str:
    return f"http://{address[0]}:{address[1]}/"


async def in_browser(look: Callable[[], None]) -> None:
    with trio.fail_after(300):
        await trio.to_thread.run_sync(look)


def ask(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def check_for_barriers(page: Any, name: str) -> None:
    if AXE is not None:
        page.evaluate(Path(AXE).read_text(encoding="utf-8"))
        found = page.evaluate("async () => (await axe.run()).violations.map(v => [v.impact, v.id, v.nodes[0].html])")
        assert [each for each in found if each[0] in ("serious", "critical")] == [], name
    if PICTURES is not None:
        page.screenshot(path=Path(PICTURES) / f"{name}.png")


async def test_an_answer_streams_is_drawn_without_its_tricks_and_stays(url: str, engine: Any) -> None:
    engine.script = [Delta(TEXT[:9], 1), Delta(TEXT[9:], 2, "stop")]

    def look() -> None:
        with browsing(url) as page:
            ask(page, f"Hello {EVIL}")
            answer = page.get_by_label("The model")
            answer.get_by_role("button", name="Ask again").wait_for()
            assert answer.locator("strong").inner_text() == "Bold"
            assert answer.locator("td").all_inner_texts() == ["1", "2"]
            assert answer.locator("code .hljs-keyword").first.inner_text() == "def"
            assert answer.locator("img, script, [onerror], a[href^=javascript]").count() == 0
            assert "2 tokens" in answer.inner_text()
            assert "prompt 5 tokens, 2 cached" in answer.inner_text()
            check_for_barriers(page, "chat")
            page.reload()
            page.get_by_label("The model").locator("strong").wait_for()
            assert "owned" not in page.title()

    await in_browser(look)
    assert engine.requests[0].prompt.messages[-1]["content"] == f"Hello {EVIL}"


async def test_it_is_stopped_asked_again_edited_and_branched(url: str, engine: Any) -> None:
    engine.script, engine.endless = [], "more "

    def look() -> None:
        with browsing(url) as page:
            ask(page, "first")
            page.get_by_text("more more").wait_for()
            page.get_by_role("button", name="Stop").click()
            page.get_by_text("You stopped it.").wait_for()
            engine.endless, engine.script = "", [Delta("second answer", 1, "stop")]
            page.get_by_role("button", name="Ask again").click()
            page.get_by_text("second answer").wait_for()
            page.get_by_role("button", name="The version before").click()
            page.get_by_text("more more").wait_for()
            page.get_by_role("button", name="Edit").click()
            page.get_by_role("textbox", name="The message").fill("edited")
            page.get_by_label("You").get_by_role("button", name="Send").click()
            page.get_by_text("2 of 2").wait_for()
            page.get_by_text("second answer").wait_for()
            assert page.get_by_label("You").inner_text().startswith("edited")

    await in_browser(look)
    assert [request.prompt.messages[-1]["content"] for request in engine.requests] == ["first", "first", "edited"]


async def test_conversations_are_named_searched_exported_brought_in_and_deleted(
    url: str, engine: Any, tmp_path: Path
) -> None:
    file = tmp_path / "note.md"
    file.write_text("A note with a [link].", encoding="utf-8")

    def look() -> None:
        with browsing(url) as page:
            page.get_by_role("button", name="Settings").click()
            page.get_by_label("System prompt").fill("Be brief.")
            page.get_by_label("Temperature").fill("0.5")
            page.get_by_role("button", name="Save").click()
            page.get_by_label("Add files of text").set_input_files(file)
            page.get_by_text("note.md").wait_for()
            ask(page, "Sum it up")
            page.get_by_role("button", name="Ask again").wait_for()
            page.get_by_role("button", name="More for Sum it up").click()
            page.get_by_label("Its name").fill("A summary")
            page.get_by_role("button", name="Rename").click()
            page.get_by_role("link", name="A summary").wait_for()
            with page.expect_download() as download:
                page.get_by_role("button", name="Export all").click()
            download.value.save_as(tmp_path / "all.json")
            page.get_by_role("button", name="More for A summary").click()
            page.get_by_role("button", name="Delete for good").click()
            page.get_by_text("None yet.").wait_for()
            page.get_by_label("Import").set_input_files(tmp_path / "all.json")
            page.get_by_role("link", name="A summary").wait_for()
            page.get_by_label("Search conversations").fill("nowhere")
            page.get_by_text("None has these words.").wait_for()

    await in_browser(look)
    (request,) = engine.requests
    system, asked = request.prompt.messages
    assert (system["content"], request.temperature) == ("Be brief.", 0.5)
    assert "A note with a [link]." in asked["content"]


async def test_the_cluster_is_shown_as_it_changes_and_its_names_are_text(
    url: str, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = engine.status

    def told() -> ClusterStatus:
        made: ClusterStatus = status()
        return replace(made, nodes=tuple(replace(node, node_id=EVIL) for node in made.nodes))

    monkeypatch.setattr(engine, "status", told)

    def look() -> None:
        with browsing(f"{url}#/cluster", viewport={"width": 390, "height": 844}, color_scheme="dark") as page:
            page.get_by_text("Layers 0 to 3 of 4").wait_for()
            assert page.locator(".machine h3").inner_text() == EVIL
            assert page.locator(".machine img").count() == 0
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
            check_for_barriers(page, "cluster")
            engine.state = "loading"
            page.get_by_role("heading", name="The cluster is loading").wait_for()

    await in_browser(look)


async def test_a_machine_is_invited_and_one_that_asks_is_let_in(url: str, engine: Any) -> None:
    def look() -> None:
        with browsing(f"{url}#/members", viewport={"width": 390, "height": 844}) as page:
            page.get_by_text("123 456").wait_for()
            page.get_by_text("<b>laptop</b> asks to join").wait_for()
            page.get_by_role("button", name="let it in").click()
            page.get_by_text("laptop-abcdefgh is a member now").wait_for()
            page.get_by_role("button", name="Make an invite").click()
            page.get_by_role("img", name="The invite as a QR code").wait_for()
            page.get_by_text("core://join/abc").wait_for()
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
            check_for_barriers(page, "members")

    await in_browser(look)
    assert ("approve", "123456") in engine.membership.asked


class TestWithKeys:
    @pytest.fixture
    def settings(self) -> ApiSettings:
        return ApiSettings(keys=frozenset({"s3cret"}))

    async def test_a_stranger_meets_a_door(self, url: str, engine: Any) -> None:
        def look() -> None:
            with browsing(url) as page:
                key = page.get_by_label("API key")
                key.fill("wrong")
                page.get_by_role("button", name="Enter").click()
                page.get_by_text("the API key is missing or wrong").wait_for()
                check_for_barriers(page, "door")
                key.fill("s3cret")
                page.get_by_role("button", name="Enter").click()
                ask(page, "hi")
                page.get_by_text("Hello world").wait_for()
                assert "s3cret" not in page.evaluate("document.cookie + JSON.stringify(localStorage)")
                page.get_by_role("button", name="Log out").click()
                page.get_by_label("API key").wait_for()

        await in_browser(look)
