"""A headless browser that opens a page of this process, which tells what it was given."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

PAGE = Path(__file__).with_name("clients.html")
PAGE_SECONDS = 90


class Handler(BaseHTTPRequestHandler):
    server: Pages

    def do_GET(self) -> None:
        if self.path == "/asked.json":
            self._answer("application/json", json.dumps(self.server.asked).encode())
        else:
            self._answer("text/html; charset=utf-8", PAGE.read_bytes())

    def do_POST(self) -> None:
        self.server.told.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self._answer("text/plain", b"")

    def _answer(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


class Pages(ThreadingHTTPServer):
    """Serves the page for the length of a block. `asked` is what the page asks of the API, `told` what it got."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.origin = f"http://127.0.0.1:{self.server_port}"
        self.other_origin = f"http://localhost:{self.server_port}"
        self.asked: dict[str, Any] = {}
        self.told: Queue[dict[str, Any]] = Queue()
        self._thread = Thread(target=self.serve_forever, daemon=True)

    def __enter__(self) -> Pages:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


def told_by_browser(browser: str, pages: Pages, origin: str) -> dict[str, Any]:
    """What the page of `origin` tells. Raises RuntimeError where it tells nothing in time."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless=new", "--disable-gpu", "--no-first-run", f"--user-data-dir={profile}"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            options.append("--no-sandbox")  # root can have none
        process = subprocess.Popen(
            [browser, *options, f"{origin}/"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            return pages.told.get(timeout=PAGE_SECONDS)
        except Empty:
            raise RuntimeError(f"the page told nothing within {PAGE_SECONDS} s") from None
        finally:
            process.terminate()
            process.wait()
