"""A Hugging Face hub on the loopback interface, for tests: the real client, and no internet.

with loopback_hub(tmp_path / "hub") as hub:      # the directory holds owner/name/files
    os.environ["HF_ENDPOINT"] = hub.url          # read by huggingface_hub when it is imported
    ...
    assert hub.served["owner/name/model.safetensors"] == 0
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

CHUNK = 64 << 10


@dataclass
class LoopbackHub:
    """Where it is, and what it served: bytes of bodies by `owner/name/file`."""

    url: str
    served: Counter[str] = field(default_factory=Counter)
    commits: set[str] = field(default_factory=set)
    """Those that it ever named: they stay valid, but only the latest has files."""
    cuts: int = 0
    """So many bodies from now on break off after `cut_after` bytes."""
    cut_after: int = CHUNK
    busy: int = 0
    """So many requests from now on are answered with 429, to come again after `retry_after` seconds."""
    retry_after: int = 1
    withheld: int = 0
    """So many bytes are missing at the end of every file, which says its whole size nevertheless."""


@contextmanager
def loopback_hub(root: Path, *, gated: Collection[str] = ()) -> Iterator[LoopbackHub]:
    """Serves each `root/owner/name` as a model repository with the one revision `main`.

    It answers what huggingface_hub asks for when it looks up and downloads files: HEAD and GET of files, ranges
    included, the repository's state and its list of files. A repository that is named in `gated` is refused as one
    whose terms were not accepted. The commit follows from the files.
    """
    hub = LoopbackHub("")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, root, frozenset(gated), hub))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, root: Path, gated: frozenset[str], hub: LoopbackHub, *connection: Any) -> None:
        self._root = root
        self._gated = gated
        self._hub = hub
        super().__init__(*connection)

    def log_message(self, format: str, *arguments: object) -> None:
        """Silent."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        if self._hub.busy > 0:
            self._hub.busy -= 1
            self._refuse(429, "TooManyRequests", {"Retry-After": str(self._hub.retry_after)})
            return
        path = unquote(urlsplit(self.path).path)
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            if self._admitted(found[1], found[2]):
                self._file(found[1], found[3])
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            if self._admitted(found[1], found[2] or "main"):
                self._json(self._state(found[1]))
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)(?:/(.*))?", path):
            if self._admitted(found[1], found[2]):
                self._tree(found[1], found[3] or "")
        else:
            self._refuse(404, "EntryNotFound")

    def _admitted(self, repo: str, revision: str) -> bool:
        if ".." in repo or not (self._root / repo).is_dir():
            self._refuse(401, "RepoNotFound")
        elif repo in self._gated:
            self._refuse(403, "GatedRepo")
        elif revision not in {"main", self._commit(repo), *self._hub.commits}:
            self._refuse(404, "RevisionNotFound")
        else:
            return True
        return False

    def _files(self, repo: str) -> list[Path]:
        return sorted(path for path in (self._root / repo).rglob("*") if path.is_file())

    def _commit(self, repo: str) -> str:
        states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in self._files(repo)]
        commit = hashlib.sha1(repr(states).encode()).hexdigest()
        self._hub.commits.add(commit)
        return commit

    def _state(self, repo: str) -> dict[str, object]:
        names = [path.relative_to(self._root / repo).as_posix() for path in self._files(repo)]
        return {"id": repo, "sha": self._commit(repo), "siblings": [{"rfilename": name} for name in names]}

    def _tree(self, repo: str, folder: str) -> None:
        root = self._root / repo
        entries = [
            {"type": "file", "path": path.relative_to(root).as_posix(), "size": path.stat().st_size, "oid": _etag(path)}
            for path in self._files(repo)
            if path.is_relative_to(root / folder)
        ]
        if entries:
            self._json(entries)
        else:
            self._refuse(404, "EntryNotFound")

    def _file(self, repo: str, name: str) -> None:
        path = self._root / repo / name
        if path not in self._files(repo):
            self._refuse(404, "EntryNotFound", {"X-Repo-Commit": self._commit(repo)})
            return
        size = path.stat().st_size
        headers = {"ETag": f'"{_etag(path)}"', "X-Repo-Commit": self._commit(repo), "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            self._send(200, headers, path, 0, size)
        elif int(wanted[1]) >= size:
            self._refuse(416, "RangeNotSatisfiable", {"Content-Range": f"bytes */{size}"})
        else:
            start, stop = int(wanted[1]), min(int(wanted[2] or size), size - 1) + 1
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
            self._send(206, headers, path, start, stop)

    def _send(self, status: int, headers: dict[str, str], path: Path, start: int, stop: int) -> None:
        if self.command == "GET":
            stop = max(start, min(stop, path.stat().st_size - self._hub.withheld))
        self._head(status, {**headers, "Content-Length": str(stop - start)})
        if self.command == "HEAD":
            return
        if self._hub.cuts > 0 and stop - start > self._hub.cut_after:
            self._hub.cuts -= 1
            stop = start + self._hub.cut_after
            self.close_connection = True
        with path.open("rb") as file:
            file.seek(start)
            while start < stop and (chunk := file.read(min(CHUNK, stop - start))):
                self._hub.served[path.relative_to(self._root).as_posix()] += len(chunk)
                self.wfile.write(chunk)
                start += len(chunk)

    def _json(self, content: object) -> None:
        body = json.dumps(content).encode()
        self._head(200, {"Content-Type": "application/json", "Content-Length": str(len(body))})
        if self.command == "GET":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self._head(status, {"X-Error-Code": code, "X-Error-Message": code, "Content-Length": "0", **(headers or {})})

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def _etag(path: Path) -> str:
    """Of large files it is their SHA-256, as on the hub; there and here weights are such files."""
    if path.suffix in (".safetensors", ".gguf"):
        return hashlib.sha256(path.read_bytes()).hexdigest()
    state = path.stat()
    return hashlib.sha1(f"{path} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()
