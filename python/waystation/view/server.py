"""The server of the window: answers one page on this machine, and nobody else.

Every request is refused unless it comes to an address of the loopback interface by name (`Host`), from the
page itself (`Origin`), and with the token, a random part of the path that is compared in constant time.
Answers tell the browser to run no code but that of `assets`, to send nothing elsewhere, and to let no other
page read or frame them. Only GET and HEAD are known, and nothing is written anywhere.

What takes long (verification, comparison, statistics) is answered line by line: `{"progress": [done, total]}`
again and again, then `{"result": …}` or `{"error": …}`. It ends when the page goes away: the next report of
progress then raises `Cancelled`. Work is done in threads of its own, for which no end of the program waits.

Anybody on the machine can connect, so connections without a request that is being answered are few: one more
has the oldest of them closed. Work that takes long is done a few at a time, and counts until it has ended,
also if its page has gone away.

A page names places by what the command was given: the number of a PATH, and the name of a checkpoint in it.
A checkpoint that was opened stays open, so all that is shown of it is of one version; those that were looked
at last are kept.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import functools
import hmac
import itertools
import os
import resource
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from waystation import storage
from waystation._errors import (
    Cancelled,
    InvalidInput,
    NotFound,
    PermissionDenied,
    Unavailable,
    from_os_error,
)
from waystation._options.in_effect import current_options
from waystation.checkpoint.paths import is_checkpoint
from waystation.layouts.opened import ArrayLeaf, Opened
from waystation.training.logger import save_calls_in_log
from waystation.transfers.statistics import saves_in_log
from waystation.view.statistics import LIMIT_BYTES, statistics_of
from waystation.view.timelines import DrawnTimeline, read_timeline

T = TypeVar("T")
OnProgress = Callable[[int, int], None]
Document = dict[str, Any]
Kind = Literal["checkpoint", "run", "timeline", "log", "closed"]

ADDRESS = "127.0.0.1"
ASSETS = Path(__file__).parent / "assets"
_TOKEN_BYTES = 24
_PROGRESS_EVERY_S = 0.2
_END_S = 2.0  # how long requests have to end once the program is to end
_MOST_THREADS = 16
_MOST_LONG = 4  # requests whose work takes long: each has buffers of its own
_MOST_CONNECTIONS = 128  # besides those whose request is being answered
_BACKLOG = 32
_MOST_OPENED = 4
_MOST_ROWS = 20_000
_LOG_LIMIT_BYTES = 256 << 20
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # the address has the token
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_STATUS = {
    "InvalidInput": 400,
    "NotFound": 404,
    "Conflict": 409,
    "Corrupt": 422,
    "Unsupported": 422,
    "Unavailable": 503,
}


# ---- what the command line knows ---------------------------------------------------------------


class SeenState(Protocol):
    """A state that stays open."""

    @property
    def opened(self) -> Opened:
        """The state."""
        ...

    def rows(self) -> Sequence[Any]:
        """The lines of its tree."""
        ...

    def leaf(self, number: int) -> Document:
        """What `inspect` says of a leaf."""
        ...


class Seen(Protocol):
    """A checkpoint that stays open."""

    def document(self) -> Document:
        """What `inspect` says of it, but for the leaves of states."""
        ...

    @property
    def states(self) -> Mapping[str, SeenState]:
        """Its states, by name."""
        ...


class Documents(Protocol):
    """The documents of the commands, made by the commands themselves."""

    def see(self, path: str) -> Seen:
        """Opens a checkpoint, as `inspect` does."""
        ...

    def ls(self, path: str) -> Document:
        """The checkpoints of a directory."""
        ...

    def verify(self, path: str, on_progress: OnProgress) -> Document:
        """What is damaged in a checkpoint."""
        ...

    def diff(self, first: str, second: str, on_progress: OnProgress, *, structure_only: bool) -> Document:
        """In what two checkpoints differ."""
        ...

    def top(self) -> Document:
        """What the agents do that are watched; NotFound if none are."""
        ...

    def error(self, error: Exception) -> Document:
        """What a command prints of an error."""
        ...

    def encoded(self, document: Any) -> str:
        """A document as text, in one line."""
        ...


# ---- places ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Source:
    """One of the PATHs that the window shows.

    Attributes:
        path: It.
        kind: What is there; `closed` where that could not be told.
    """

    path: str
    kind: Kind


def sources_at(paths: Sequence[str]) -> list[Source]:
    """What is at each of some paths. One that cannot be looked at now is shown as such beside others.

    Raises:
        PermissionDenied, Unavailable: None of them can be looked at.
        NotFound, InvalidInput: One is a mistake, see `source_at`.
    """
    sources, refusals = list[Source](), list[Exception]()
    for path in paths:
        try:
            sources.append(source_at(path))
        except (PermissionDenied, Unavailable) as error:
            sources.append(Source(storage.located(path), "closed"))
            refusals.append(error)
    if refusals and len(refusals) == len(sources):
        raise refusals[0]
    return sources


def source_at(path: str) -> Source:
    """What is at a path.

    Raises:
        NotFound: Nothing is.
        InvalidInput: It is a published model.
        PermissionDenied, Unavailable: It cannot be looked at.
    """
    place = storage.located(path)
    if place.endswith(".safetensors"):
        raise InvalidInput(
            f"'{place}' is a published model; the window shows checkpoints, runs, timelines and logs",
            path=place,
        )
    if storage.is_file(place):
        return Source(place, "timeline" if place.endswith((".json", ".jsonl")) else "log")
    if is_checkpoint(place):
        return Source(place, "checkpoint")
    if storage.is_directory(storage.resolved(place)):
        return Source(place, "run")
    raise NotFound(
        f"nothing is at '{place}'; give a checkpoint, a directory of checkpoints, a timeline or a log",
        path=place,
    )


# ---- the server --------------------------------------------------------------------------------


def listen(port: int) -> socket.socket:
    """Takes a port of the loopback interface; 0 takes any that is free.

    Raises:
        Unavailable: Another program has it, or it is one that needs rights.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((ADDRESS, port))
        listener.listen()
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise Unavailable(
                f"another program listens at port {port} of this machine; give another --port, or none to "
                "take one that is free",
                port=port,
            ) from None
        raise from_os_error(error, "listen at", f"{ADDRESS}:{port}") from None
    return listener


class Window:
    """A server that has its address, and answers from `run` on.

    Args:
        sources: What it shows.
        documents: Makes the documents of commands.
        listener: As `listen` gives it; closed by `run`.
        watches: Whether there are agents to be watched.

    Attributes:
        url: The address of the page, with the token.
    """

    def __init__(
        self, sources: Sequence[Source], documents: Documents, listener: socket.socket, *, watches: bool
    ) -> None:
        port = listener.getsockname()[1]
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        self.url: str = f"http://{ADDRESS}:{port}/{token}/"
        self._listener = listener
        self._answers = _Answers(sources, documents, watches=watches)
        guarded = _Guard(self._answers.application(), token, port)
        config = uvicorn.Config(
            guarded,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            http=_Connection,
            backlog=_BACKLOG,  # asyncio accepts so many at once
            loop="asyncio",
            server_header=False,
            timeout_graceful_shutdown=int(_END_S),
        )
        self._server = uvicorn.Server(config)

    def run(self) -> None:
        """Answers until the program is interrupted, or `stop` is called. What goes on then is cancelled."""
        context = contextvars.copy_context()  # how stores are reached
        try:
            context.run(self._server.run, sockets=[self._listener])
        finally:
            self._answers.end()
            self._listener.close()

    def stop(self) -> None:
        """Has `run` return."""
        self._server.should_exit = True


class _Connection(H11Protocol):
    """A connection that makes room where too many wait: only the oldest without a request is closed.

    uvicorn waits for ever for the rest of a request, and accepts connections until no file can be opened.
    """

    _numbers = itertools.count()
    _most = min(_MOST_CONNECTIONS, max(8, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn
        """Takes a connection."""
        self._number = next(self._numbers)
        waiting = [one for one in self.connections if isinstance(one, _Connection) and one.waits]
        if len(waiting) >= self._most:
            min(waiting, key=lambda one: one._number).transport.abort()
        super().connection_made(transport)

    @property
    def waits(self) -> bool:
        """Whether no request of it is being answered."""
        cycle: Any = self.cycle  # None before the first request
        return not self.transport.is_closing() and (cycle is None or cycle.response_complete)


class _Guard:
    """Lets requests through that may be answered, without the token in their path."""

    def __init__(self, application: ASGIApp, token: str, port: int) -> None:
        self._application = application
        self._token = token.encode()
        self._hosts = {f"{name}:{port}".encode() for name in (ADDRESS, "localhost")}
        self._origins = {b"http://" + host for host in self._hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *headers]}
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None:
            status, text = refusal
            answer = Response(text + "\n", status, media_type="text/plain")
            await answer(scope, receive, send_guarded)
            return
        _, _, rest = scope["path"].removeprefix("/").partition("/")
        inner = {**scope, "path": f"/{rest}", "raw_path": f"/{rest}".encode(), "root_path": ""}
        await self._application(inner, receive, send_guarded)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if headers.get(b"host", b"").lower() not in self._hosts:
            return 421, "this server answers for the loopback address only"
        if headers.get(b"origin", next(iter(self._origins))).lower() not in self._origins:
            return 403, "this server answers its own page only"
        given = scope["path"].removeprefix("/").partition("/")[0].encode(errors="replace")
        if not hmac.compare_digest(given, self._token):
            return (
                403,
                "open the address that 'waystation view' has printed: its token is missing here, or old",
            )
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "this server changes nothing"
        return None


@dataclass(slots=True)
class _Open:
    """A checkpoint that a page has opened, and the lines of its trees once they were asked for."""

    seen: Seen
    rows: dict[str, Sequence[Any]] = field(default_factory=dict)


class _Answers:
    """What the page can ask for."""

    def __init__(self, sources: Sequence[Source], documents: Documents, *, watches: bool) -> None:
        self._sources = list(sources)
        self._documents = documents
        self._watches = watches
        self._numbers = itertools.count(1)
        self._opened: OrderedDict[int, _Open] = OrderedDict()
        self._timelines: OrderedDict[int, DrawnTimeline] = OrderedDict()
        self._lock = threading.Lock()
        self._threads = asyncio.Semaphore(_MOST_THREADS)
        self._long = asyncio.Semaphore(_MOST_LONG)
        self._has_ended = threading.Event()

    def application(self) -> Starlette:
        """The routes."""
        plain: dict[str, Callable[[Request], Document]] = {
            "sources": self._tell_sources,
            "look": self._look_again,
            "ls": lambda request: self._documents.ls(self._path(request)),
            "inspect": self._inspect,
            "rows": self._rows,
            "leaf": self._leaf,
            "timeline": self._timeline,
            "event": self._event,
            "log": self._log,
            "top": lambda _: self._documents.top(),
        }
        long: dict[str, Callable[[Request, OnProgress], Document]] = {
            "verify": lambda request, told: self._documents.verify(self._path(request), told),
            "diff": self._diff,
            "statistics": self._statistics,
        }
        routes: list[Route | Mount] = [
            Route(f"/api/{name}", functools.partial(self._answer, answer)) for name, answer in plain.items()
        ]
        routes += [
            Route(f"/api/{name}", functools.partial(self._follow, answer)) for name, answer in long.items()
        ]
        return Starlette(routes=[*routes, Mount("/", StaticFiles(directory=ASSETS, html=True))])

    def end(self) -> None:
        """Has everything end that goes on."""
        self._has_ended.set()

    # How requests are answered.

    async def _answer(self, answer: Callable[[Request], Document], request: Request) -> Response:
        try:
            document = await self._in_thread(lambda: answer(request), self._threads)
        except Exception as error:
            told = self._documents.error(error)
            return self._json(told, _STATUS.get(told["error"]["kind"], 500))
        return self._json(document)

    def _json(self, document: Document, status: int = 200) -> Response:
        return Response(self._documents.encoded(document), status, media_type="application/json")

    async def _follow(self, answer: Callable[[Request, OnProgress], Document], request: Request) -> Response:
        return StreamingResponse(self._lines(answer, request), media_type="application/x-ndjson")

    async def _lines(
        self, answer: Callable[[Request, OnProgress], Document], request: Request
    ) -> AsyncIterator[str]:
        progress, is_left = (0, 0), threading.Event()

        def told(done: int, total: int) -> None:
            nonlocal progress
            progress = done, total
            if is_left.is_set() or self._has_ended.is_set():
                raise Cancelled("the page that has asked for this is gone")

        work = asyncio.ensure_future(self._in_thread(lambda: answer(request, told), self._long))
        try:
            while not work.done():
                yield self._line({"progress": list(progress)})
                await asyncio.wait([work], timeout=_PROGRESS_EVERY_S)
            try:
                yield self._line({"result": work.result()})
            except Exception as error:
                yield self._line(self._documents.error(error))
        finally:
            is_left.set()
            if not work.cancel() and not work.cancelled():
                work.exception()  # or it is logged that nobody has asked

    def _line(self, document: Document) -> str:
        return self._documents.encoded(document) + "\n"

    async def _in_thread(self, call: Callable[[], T], places: asyncio.Semaphore) -> T:
        """What a call returns, made in a thread that the end of the program does not wait for.

        It takes one of the places until it has ended, also if nobody waits for it any more.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        context = contextvars.copy_context()

        def settle(act: Callable[[], None]) -> None:
            def unless_done() -> None:
                places.release()
                if not future.done():
                    act()

            try:
                loop.call_soon_threadsafe(unless_done)
            except RuntimeError:  # nobody waits any more
                return

        def run() -> None:
            try:
                result = context.run(call)
            except Exception as error:
                settle(functools.partial(future.set_exception, error))
            else:
                settle(functools.partial(future.set_result, result))

        await places.acquire()
        try:
            threading.Thread(target=run, name="waystation: window", daemon=True).start()
        except RuntimeError:  # the system gives no more threads
            places.release()
            raise
        return await future

    # What requests name.

    def _source(self, request: Request, kinds: Sequence[Kind], of: str = "source") -> Source:
        number = _whole(request, of)
        if not 0 <= number < len(self._sources) or self._sources[number].kind not in kinds:
            raise NotFound(f"this window shows nothing of that kind under number {number}")
        return self._sources[number]

    def _path(self, request: Request, prefix: str = "") -> str:
        """A PATH, or a checkpoint that is named in it."""
        source = self._source(request, ("checkpoint", "run"), f"{prefix}source")
        name = request.query_params.get(f"{prefix}name", "")
        if not name:
            return source.path
        if source.kind != "run" or name in (".", "..") or set(name) & {"/", "\0"}:
            raise InvalidInput(f"'{name}' names no checkpoint of '{source.path}'")
        return os.path.join(source.path, name)

    def _open_one(self, request: Request) -> _Open:
        number = _whole(request, "opened")
        with self._lock:
            if number not in self._opened:
                raise NotFound("the window has closed this checkpoint to open others; reload the page")
            self._opened.move_to_end(number)
            return self._opened[number]

    def _state(self, request: Request) -> tuple[_Open, SeenState]:
        opened = self._open_one(request)
        name = request.query_params.get("checkpointable", "")
        states = opened.seen.states
        if name not in states:
            raise NotFound(f"the checkpoint has no state '{name}'")
        return opened, states[name]

    # Answers.

    def _tell_sources(self, _request: Request) -> Document:
        return {
            "sources": [
                {"source": number, "kind": source.kind, "path": source.path}
                for number, source in enumerate(self._sources)
            ],
            "watches": self._watches,
            "limit_bytes": LIMIT_BYTES,
        }

    def _look_again(self, request: Request) -> Document:
        """What is at a path that could not be looked at before; raises what is still in the way."""
        number = _whole(request, "source")
        found = source_at(self._source(request, ("closed",)).path)
        self._sources[number] = found
        return {"source": number, "kind": found.kind}

    def _inspect(self, request: Request) -> Document:
        seen = self._documents.see(self._path(request))
        with self._lock:
            number = next(self._numbers)
            self._opened[number] = _Open(seen)
            while len(self._opened) > _MOST_OPENED:
                self._opened.popitem(last=False)
        return {"opened": number, "document": seen.document()}

    def _rows(self, request: Request) -> Document:
        """Lines of the tree, in columns: of what many lines have in common, each kind once."""
        opened, state = self._state(request)
        name = request.query_params["checkpointable"]
        if name not in opened.rows:
            opened.rows[name] = state.rows()
        rows = opened.rows[name]
        begin = max(0, _whole(request, "begin"))
        page = rows[begin : begin + _MOST_ROWS]
        kinds: dict[tuple[str, str], int] = {}
        return {
            "total": len(rows),
            "begin": begin,
            "names": [row.name for row in page],
            "parents": [row.parent for row in page],
            "depths": [row.depth for row in page],
            "leaves": [row.number if row.is_leaf else -2 for row in page],
            "bytes": [row.nbytes for row in page],
            "kinds": [kinds.setdefault((row.description, row.placement), len(kinds)) for row in page],
            "kind_texts": list(kinds),
        }

    def _leaf(self, request: Request) -> Document:
        _, state = self._state(request)
        number = _leaf_number(request, state)
        stored = state.opened.tree.leaves[number]
        cut = state.opened.storage_metadata(stored.array) if isinstance(stored, ArrayLeaf) else None
        return {"leaf": state.leaf(number), "storage": None if cut is None else asdict(cut)}

    def _statistics(self, request: Request, on_progress: OnProgress) -> Document:
        _, state = self._state(request)
        leaf = state.opened.tree.leaves[_leaf_number(request, state)]
        if not isinstance(leaf, ArrayLeaf):
            raise InvalidInput("this leaf is no array: its value is all that there is")
        limit_bytes = None if request.query_params.get("all") == "1" else LIMIT_BYTES
        begun_s = time.monotonic()
        found = statistics_of(
            state.opened, leaf.array, current_options(), limit_bytes=limit_bytes, on_progress=on_progress
        )
        took_s = time.monotonic() - begun_s
        return {**found.document(), "limit_bytes": limit_bytes, "took_s": took_s}

    def _diff(self, request: Request, on_progress: OnProgress) -> Document:
        paths = self._path(request), self._path(request, "other_")
        structure_only = request.query_params.get("structure_only") == "1"
        return self._documents.diff(*paths, on_progress, structure_only=structure_only)

    def _timeline(self, request: Request) -> Document:
        source = self._source(request, ("timeline",))
        found = read_timeline(source.path)
        with self._lock:
            self._timelines[_whole(request, "source")] = found
            self._timelines.move_to_end(_whole(request, "source"))
            while len(self._timelines) > _MOST_OPENED:
                self._timelines.popitem(last=False)
        return {"path": source.path, **found.document()}

    def _event(self, request: Request) -> Document:
        with self._lock:
            found = self._timelines.get(_whole(request, "source"))
        number = _whole(request, "event")
        if found is None or not 0 <= number < len(found.source):
            raise NotFound("the window has closed this timeline to open others; reload the page")
        return {"event": found.source[number]}

    def _log(self, request: Request) -> Document:
        source = self._source(request, ("log",))
        content = storage.read_file(source.path, limit_bytes=_LOG_LIMIT_BYTES)
        lines = content.decode(errors="replace").splitlines()
        return {
            "path": source.path,
            "saves": [asdict(save) for save in saves_in_log(lines)],
            "calls": [asdict(call) for call in save_calls_in_log(lines)],
        }


def _whole(request: Request, name: str) -> int:
    text = request.query_params.get(name, "0")
    if not text.isascii() or not text.isdecimal() or len(text) > 12:
        raise InvalidInput(f"'{name}' is a whole number, not '{text:.40}'")
    return int(text)


def _leaf_number(request: Request, state: SeenState) -> int:
    number = _whole(request, "leaf")
    if number >= len(state.opened.tree.leaves):
        raise NotFound(f"the state has no leaf of number {number}")
    return number
