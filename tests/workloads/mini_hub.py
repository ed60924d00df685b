"""A small data-set hub on 127.0.0.1: the part of the protocol that streaming through ``datasets`` uses.

Serves whole repositories out of a dictionary, with range requests, and counts the bytes it sent of each file.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class MiniHub:
    """Repositories as ``{"owner/name": {"path": bytes}}``; use as a context manager."""

    def __init__(self, repositories: dict[str, dict[str, bytes]]) -> None:
        self.repositories = repositories
        self.sent: Counter[str] = Counter()
        self.requests: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> MiniHub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: MiniHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._route(urlsplit(self.path))

    def do_HEAD(self) -> None:
        self._route(urlsplit(self.path))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        self._route(urlsplit(self.path), body)

    def log_message(self, *_: object) -> None:
        pass

    def _route(self, url: SplitResult, body: str = "") -> None:
        self.hub.requests.append(f"{self.command} {self.path}")
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        if parts[:2] == ["api", "datasets"] and len(parts) >= 4:
            self._api("/".join(parts[2:4]), parts[4:], body)
        elif parts[0] == "datasets" and len(parts) > 5 and parts[3] == "resolve":
            self._resolve("/".join(parts[1:3]), "/".join(parts[5:]))
        else:
            self._missing("RepoNotFound")

    def _api(self, name: str, rest: list[str], body: str) -> None:
        files = self.hub.repositories.get(name)
        if files is None:
            self._missing("RepoNotFound")
        elif not rest or rest[0] == "revision":
            siblings = [{"rfilename": path} for path in files]
            self._json({"id": name, "sha": COMMIT, "siblings": siblings, "private": False, "gated": False,
                        "disabled": False, "tags": [], "downloads": 0, "likes": 0})  # fmt: skip
        elif rest[0] == "tree":
            self._json(_tree(files, "/".join(rest[2:])))
        elif rest[0] == "paths-info":
            paths = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
            self._json([entry for path in paths for entry in _entry(files, path)])
        else:
            self._missing("EntryNotFound")

    def _resolve(self, name: str, path: str) -> None:
        content = self.hub.repositories.get(name, {}).get(path)
        if content is None:
            self._missing("EntryNotFound")
            return
        first, last = 0, len(content) - 1
        wanted = self.headers.get("Range")
        if wanted:
            start, _, end = wanted.removeprefix("bytes=").partition("-")
            first, last = int(start), min(int(end or last), last)
        piece = content[first : last + 1]
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("Content-Length", str(len(piece)))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{_oid(content)}"')
        self.end_headers()
        if self.command == "GET":
            self.hub.sent[path] += len(piece)
            try:
                self.wfile.write(piece)
            except ConnectionError:
                self.close_connection = True

    def _json(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _missing(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _entry(files: dict[str, bytes], path: str) -> list[dict[str, object]]:
    if path in files:
        return [{"type": "file", "path": path, "size": len(files[path]), "oid": _oid(files[path])}]
    if any(name.startswith(f"{path}/") for name in files):
        return [{"type": "directory", "path": path, "oid": COMMIT}]
    return []


def _tree(files: dict[str, bytes], folder: str) -> list[dict[str, object]]:
    inside = [path for path in files if not folder or path.startswith(f"{folder}/")]
    folders = {path.rsplit("/", 1)[0] for path in inside if "/" in path} - {folder}
    return [entry for path in [*sorted(folders), *inside] for entry in _entry(files, path)]
