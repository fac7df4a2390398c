"""A real server of S3's protocol on this machine, and a proxy before it that tests can stop at any
request."""

from __future__ import annotations

import contextlib
import functools
import http.client
import http.server
import itertools
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support import programs
from tests.support.programs import HANG_S
from tests.support.servers import serve

import waystation

ACCESS_KEY, SECRET_KEY = "waystationtests", "e5b1-not-to-be-seen"

_numbers = itertools.count()

# What becomes of a request: it is passed on, or its connection is closed before that, or before the answer,
# or in the middle of it; the answer comes late, has a wrong bit, or, of a listing, is that of the request
# before; or it is answered by one of the statuses, where the request was passed on before or not; or it is
# answered that it is not allowed, or that it was signed by a clock that is wrong.
PASS, REFUSE, LOSE_ANSWER, TRUNCATE, FORBID = "pass", "refuse", "lose answer", "truncate", "AccessDenied"
SKEWED = "RequestTimeTooSkewed"
SLOW, FLIP, STALE = "slow", "flip", "stale"
STATUSES, STATUSES_AFTER = ("429", "500", "503"), ("500 after", "503 after")
# There is no room for what is written; stores say so by a status, or by a code.
FULL, QUOTA = "507", "QuotaExceeded"
SLOW_S = 0.2
# What is answered only once whoever asked has given up, or a load without second requests would fail.
STUCK, STUCK_S = "stuck", 20.0
_FORBIDDEN = "<Error><Code>{code}</Code><Message>It is not allowed</Message></Error>"


# Status, headers and body.
Answer = tuple[int, list[tuple[str, str]], bytes]


class Bucket:
    """A bucket of its own.

    Attributes:
        location: `s3://bucket`.
        endpoint: Where its server listens.
        folder: Where that keeps it.
    """

    def __init__(self, endpoint: str, folder: Path) -> None:
        folder.mkdir()
        self.location = f"s3://{folder.name}"
        self.endpoint = endpoint
        self.folder = folder

    def names(self) -> list[str]:
        """The names of all objects, in order; of uploads that were neither completed nor aborted as well."""
        return sorted(
            os.path.relpath(os.path.join(directory, file), self.folder)
            for directory, _, files in os.walk(self.folder)
            for file in files
        )

    def publish(self, *, is_listed: bool) -> None:
        """Lets everybody read it, and list it as well."""
        what = [f"arn:aws:s3:::{self.folder.name}", f"arn:aws:s3:::{self.folder.name}/*"]
        actions = ["s3:GetObject", *(["s3:ListBucket"] if is_listed else [])]
        statement = {"Effect": "Allow", "Principal": "*", "Action": actions, "Resource": what}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        os.setxattr(self.folder, "user.policy", policy.encode())  # where the server keeps it

    def settings(self, endpoint: str) -> dict[str, str]:
        """How it is reached at an address; in capitals these are variables of the environment."""
        return settings(endpoint)

    def context(
        self, endpoint: str | None = None, *, deadline_s: float = HANG_S, **own: str
    ) -> waystation.Context:
        """Options by which it is reached, at another address than its own where one is given."""
        made = waystation.Context()
        made.storage.deadline_s = deadline_s
        made.storage.settings = {**self.settings(endpoint or self.endpoint), **own}
        return made


def context(endpoint: str, *, deadline_s: float = HANG_S, **own: str) -> waystation.Context:
    """Options by which the server at an address is reached."""
    made = waystation.Context()
    made.storage.deadline_s = deadline_s
    made.storage.settings = {**settings(endpoint), **own}
    return made


def settings(endpoint: str) -> dict[str, str]:
    """How the server at an address is reached; in capitals these are variables of the environment."""
    return {
        "aws_endpoint": endpoint,
        "aws_allow_http": "true",
        "aws_region": "us-east-1",
        "aws_access_key_id": ACCESS_KEY,
        "aws_secret_access_key": SECRET_KEY,
    }


def folder_of(location: str) -> Path:
    """The directory in which the server of this process keeps what is at a location."""
    _, directory = _server()
    return directory / location.removeprefix("s3://")


def bucket() -> Bucket:
    """A new bucket; skips the test where no server is installed."""
    endpoint, directory = _server()
    return Bucket(endpoint, directory / f"bucket-{os.getpid()}-{next(_numbers)}")


@functools.cache
def _server() -> tuple[str, Path]:
    # `tools/versitygw` puts it beside the interpreter.
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    program = shutil.which("versitygw", path=path)
    if program is None:
        pytest.skip("versitygw is not installed; 'make versitygw' does that where Go is")
    keys = {"ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY}
    address, directory = serve(
        program,
        lambda port, place: ["--quiet", "--port", f"127.0.0.1:{port}", "posix", os.fspath(place)],
        keys,
    )
    return f"http://{address}", directory


class Proxy:
    """Passes requests on to a server, one after the other, and shows each to a test first.

    Attributes:
        endpoint: Where it listens.
        requests: Method and path of each so far.
        sent_bytes: Of the bodies of all answers that the server has given.
    """

    def __init__(self, endpoint: str, on_request: Callable[[int], str], ignores: Sequence[str] = ()) -> None:
        self._ignores = ignores
        self.requests: list[tuple[str, str]] = []
        self.sent_bytes = 0
        self._target = endpoint.removeprefix("http://")
        self._on_request = on_request
        self._lock = threading.Lock()
        self._listings: dict[str, Answer] = {}  # the last of each request for one
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError):
                    super().handle_one_request()

            def pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                decision, answer = proxy._decide(self.command, self.path, self.headers, body)
                self.close_connection = decision not in (PASS, SLOW, STUCK, FLIP, STALE)
                if answer is None:
                    return
                if decision in (SLOW, STUCK):
                    time.sleep(SLOW_S if decision == SLOW else STUCK_S)
                status, headers, content = answer
                if decision == FLIP and content and status < http.HTTPStatus.BAD_REQUEST:
                    middle = len(content) // 2
                    content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
                self.send_response_only(status)
                for name, value in headers:
                    if name.lower() not in ("transfer-encoding", "connection"):
                        self.send_header(name, value)
                if not any(name.lower() == "content-length" for name, _ in headers):
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2] if decision == TRUNCATE else content)

        for method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
            setattr(Handler, f"do_{method}", Handler.pass_on)
        return Handler

    def _decide(self, method: str, path: str, headers: Any, body: bytes) -> tuple[str, Answer | None]:
        """What becomes of a request, and its answer, if it gets one."""
        with self._lock:
            self.requests.append((method, path))
            decision = self._on_request(len(self.requests))
            if decision == REFUSE:
                return decision, None
            if decision in (FORBID, SKEWED, QUOTA):
                return decision, (http.HTTPStatus.FORBIDDEN, [], _FORBIDDEN.format(code=decision).encode())
            if decision in (*STATUSES, FULL):
                return decision, (int(decision), [], b"")
            answer = self.ask(method, path, headers, body)
            self.sent_bytes += len(answer[2])
            if decision in STATUSES_AFTER:
                return decision, (int(decision.split()[0]), [], b"")
            if "list-type=" in path and answer[0] == http.HTTPStatus.OK:
                last = self._listings.get(path, answer)
                self._listings[path] = answer
                answer = last if decision == STALE else answer
            return decision, None if decision == LOSE_ANSWER else answer

    def ask(self, method: str, path: str, headers: Any, body: bytes) -> Answer:
        connection = http.client.HTTPConnection(self._target)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                if method != "DELETE" or name.lower() not in self._ignores:
                    connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()


@contextlib.contextmanager
def proxy(
    endpoint: str, on_request: Callable[[int], str] = lambda _: PASS, *, ignores: Sequence[str] = ()
) -> Iterator[Proxy]:
    """A proxy before a server. `on_request` is told the number of each request before it is passed on, and
    returns what becomes of it. Headers of removals that it `ignores` the server does not get."""
    made = Proxy(endpoint, on_request, ignores)
    made._thread.start()
    try:
        yield made
    finally:
        made._server.shutdown()
        made._thread.join(HANG_S)
        made._server.server_close()


def killed_at(place: Bucket, number: int, call: Callable[..., None], *arguments: object) -> bool:
    """Has another process call `call(endpoint, *arguments)`, and kills it as it makes a request; False if
    there are not so many."""
    started = threading.Event()

    def kill(request: int) -> str:
        assert started.wait(HANG_S)
        if request < number:
            return PASS
        if request == number:
            os.kill(process.pid or 0, signal.SIGKILL)
        return REFUSE  # also what it had sent before it was killed

    with proxy(place.endpoint, kill) as between:
        process = programs.context.Process(target=call, args=(between.endpoint, *arguments), daemon=True)
        process.start()
        started.set()
        process.join(HANG_S)
        assert process.exitcode in (0, -signal.SIGKILL)
        return process.exitcode != 0
