"""A real server of HTTP on this machine that sends the files of a directory, by ranges and with tags, and can
be told to do some of it badly."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.programs import HANG_S

_PIECE_BYTES = 1 << 20


@dataclass
class Manners:
    """How the server behaves; tests change it while it runs.

    Attributes:
        sends_ranges: Whether it sends parts of files; else it sends them whole whatever is asked for.
        sends_tags: Whether answers have an ETag.
        sends_times: Whether they have a Last-Modified.
        tag_prefix: What tags begin with.
        pause_s: How long it waits before each MiB of a body.
        sent_bytes: After how many bytes of a body it closes the connection.
        query: What the query of a request must be; others are refused.
        before: Called with method, path and range before a request is answered.
    """

    sends_ranges: bool = True
    sends_tags: bool = True
    sends_times: bool = True
    tag_prefix: str = ""
    pause_s: float = 0.0
    sent_bytes: int | None = None
    query: str | None = None
    before: Callable[[str, str, str | None], None] = field(default=lambda *_: None)


@dataclass
class Site:
    """The server.

    Attributes:
        url: Where it is, without a slash at the end.
        manners: How it behaves.
        requests: Method, path and range of each request so far.
        authorizations: What requests had in the header that proves who sends them.
    """

    url: str
    manners: Manners
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    authorizations: list[str] = field(default_factory=list)


@contextlib.contextmanager
def site(directory: Path, **manners: object) -> Iterator[Site]:
    """Serves a directory as long as the block lasts. `/moved/` redirects to what follows."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    made = Site(f"http://127.0.0.1:{server.server_address[1]}", Manners(**manners))  # type: ignore[arg-type]
    server.RequestHandlerClass = type("Handler", (_Handler,), {"directory": directory, "made": made})
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        thread.join(HANG_S)
        server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    directory: Path
    made: Site
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def handle_one_request(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle_one_request()

    def answer(self) -> None:
        manners = self.made.manners
        path, _, query = self.path.partition("?")
        name = urllib.parse.unquote(path).lstrip("/")
        wanted = self.headers.get("Range")
        self.made.requests.append((self.command, "/" + name, wanted))
        self.made.authorizations += self.headers.get_all("Authorization") or []
        manners.before(self.command, "/" + name, wanted)
        if name.startswith("moved/"):
            self.begin(302, {"Location": f"/{name.removeprefix('moved/')}", "Content-Length": "0"})
            return
        if manners.query is not None and query != manners.query:
            self.send(403, {}, f"<Error><Code>AccessDenied</Code>{self.path}</Error>".encode())
            return
        file = self.directory / name
        if file.is_dir():
            self.send(200, {}, b"<!DOCTYPE html><title>Index of it</title>")
        elif file.is_file():
            self.send_file(file, wanted if manners.sends_ranges else None)
        else:
            self.send(404, {}, b"<html>there is no such page</html>")

    def send_file(self, file: Path, wanted: str | None) -> None:
        content, manners = file.read_bytes(), self.made.manners
        headers = {}
        tag = f'{manners.tag_prefix}"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'
        if manners.sends_tags:
            headers["ETag"] = tag
        if manners.sends_times:
            headers["Last-Modified"] = self.date_time_string(int(file.stat().st_mtime))
        if self.headers.get("If-Match", tag) != tag:
            self.send(412, headers, b"")
            return
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted or "")
        if found is None:
            self.send(200, headers, content)
            return
        begin, end = int(found[1]), min(int(found[2] or len(content) - 1) + 1, len(content))
        if begin >= len(content):
            self.send(416, {"Content-Range": f"bytes */{len(content)}"}, b"")
            return
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
        self.send(206, headers, content[begin:end])

    def send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.begin(status, headers | {"Content-Length": str(len(body))})
        if self.command == "HEAD":
            return
        limit = self.made.manners.sent_bytes
        if status in (200, 206) and limit is not None and len(body) > limit:
            body = body[:limit]
            self.close_connection = True
        for begin in range(0, len(body), _PIECE_BYTES):
            time.sleep(self.made.manners.pause_s)
            self.wfile.write(body[begin : begin + _PIECE_BYTES])

    def begin(self, status: int, headers: dict[str, str]) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


for _method in ("GET", "HEAD", "PUT", "DELETE", "PROPFIND", "MKCOL", "COPY"):
    setattr(_Handler, f"do_{_method}", _Handler.answer)
