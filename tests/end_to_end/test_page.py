"""The page in a real browser on a real cluster, one of whose machines dies in mid-answer. Skipped without a browser."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest
import trio

from core.testing.checkpoints import tiny_checkpoint
from core.testing.cluster import open_cluster

SECONDS = 300
TOKENS = 1000
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PICTURES = os.environ.get("CORE_TEST_PICTURES")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None or importlib.util.find_spec("playwright") is None, reason="no browser here")
async def test_an_answer_says_which_machine_went_and_goes_on_by_itself(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model", endless=True, max_position_embeddings=2 * TOKENS)
    with trio.fail_after(SECONDS):
        async with open_cluster(model, "--dtype", "fp32", "--min-nodes", "2", "--max-nodes", "2") as cluster:
            for name in ("a", "b"):
                await cluster.start_node(name)
            await cluster.wait_ready()

            def look() -> None:
                from playwright.sync_api import sync_playwright

                with sync_playwright() as playwright:
                    browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
                    page = browser.new_page()
                    page.goto(cluster.url)
                    page.get_by_role("button", name="Settings").click()
                    page.get_by_label("Tokens at most").fill(str(TOKENS))
                    page.get_by_role("button", name="Save").click()
                    page.get_by_label("Message", exact=True).fill("Hello")
                    page.keyboard.press("Enter")
                    page.get_by_label("The model").locator(".markdown > div").first.wait_for()
                    trio.from_thread.run(cluster.kill, "b")
                    page.get_by_text("The answer waits, and goes on by itself.").wait_for()
                    assert "b" in page.locator(".suspended").inner_text()
                    if PICTURES is not None:
                        page.screenshot(path=Path(PICTURES) / "suspended.png")
                    trio.from_thread.run(cluster.start_node, "c")
                    page.get_by_text("It went on by itself after a machine went away").wait_for(timeout=60_000)
                    answer = page.get_by_label("The model")
                    answer.get_by_text("tokens/s").wait_for()
                    assert answer.locator(".trouble").count() == 0
                    page.get_by_role("link", name="Cluster").click()
                    page.get_by_role("heading", name="The cluster serves").wait_for()
                    assert page.locator(".machine h3").all_inner_texts() == ["a", "c"]
                    page.get_by_text("b left").first.wait_for()
                    browser.close()

            await trio.to_thread.run_sync(look)
