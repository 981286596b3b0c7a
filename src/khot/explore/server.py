"""The application behind ``khot explore`` and the loop that serves it on this machine only."""

from __future__ import annotations

import asyncio
import socket
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from khot.explore import answer
from khot.explore.question import EXAMPLE, MAX_QUERY, Question, read

HOST = "127.0.0.1"
ASSETS = Path(__file__).parent / "assets"
MAX_HEAD = 16 * 1024  # bytes of request line and headers together
MAX_CONNECTIONS = 32
MAX_SECONDS = 10.0  # of one connection, from the first byte asked to the last byte read
HEADERS = {
    b"content-security-policy": b"default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cache-control": b"no-store",
    b"connection": b"close",  # one question for each connection, so that its time can be bounded
}


def application() -> Starlette:
    """Three questions and the files of the page. A foreign ``Host`` header is refused: no other site can reach it through DNS."""
    return Starlette(
        routes=[
            Route("/api/table", _asks(lambda asked: answer.table(), plain=True)),
            Route("/api/soft", _asks(answer.soft)),
            Route("/api/sample", _asks(answer.sampled)),
            Mount("/", StaticFiles(directory=ASSETS, html=True)),
        ],
        middleware=[Middleware(_Headers), Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"]), Middleware(_ShortQuery)],
        exception_handlers={HTTPException: _refused},
    )


def _asks(reply: Callable[[Any], dict[str, Any]], *, plain: bool = False) -> Callable[[Request], Response]:
    """An endpoint, run in a thread: what is wrong with a question is told with status 400."""

    def endpoint(request: Request) -> Response:
        try:
            asked: Question | None = None if plain else read(_once(request))
            return JSONResponse(reply(asked))
        except (ValueError, TypeError) as error:
            return JSONResponse({"error": str(error)}, status_code=400)

    return endpoint


def _once(request: Request) -> dict[str, str]:
    """The query; a name that comes twice would hide what was asked."""
    query = request.query_params
    if len(query.multi_items()) != len(query):
        raise ValueError("every parameter must be given once; scores are one list, x=1,4,2,3")
    return dict(query)


def _refused(request: Request, error: Exception) -> Response:
    known = error if isinstance(error, HTTPException) else HTTPException(500)
    return JSONResponse({"error": known.detail}, status_code=known.status_code, headers=known.headers)


class _ShortQuery:
    """Refuses a long query before anything reads it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(scope.get("query_string", b"")) > MAX_QUERY:
            refusal = JSONResponse({"error": f"the query must have at most {MAX_QUERY} bytes; ask for fewer scores"}, status_code=414)
            return await refusal(scope, receive, send)
        await self.app(scope, receive, send)


class _Headers:
    """Every response forbids what the page does not need: other hosts, frames, guesses of types."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [(name, value) for name, value in message.get("headers", []) if name not in HEADERS]
                message = {**message, "headers": [*kept, *HEADERS.items()]}
            await send(message)

        await self.app(scope, receive, with_headers)


class Impatient(H11Protocol):
    """A client that sends its request or reads its answer too slowly is cut off: it does not take a place from others for long."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._end = self.loop.call_later(MAX_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end.cancel()
        super().connection_lost(exc)


def bind(port: int) -> socket.socket:
    """A socket that listens on this machine's own address; port 0 takes any that is free. Who comes before :func:`serve` waits for it."""
    if not 0 <= port <= 65535:
        raise ValueError(f"port must be between 0 and 65535, got {port}")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen(MAX_CONNECTIONS)
    except OSError as error:
        listener.close()
        raise OSError(f"port {port} is in use or not allowed ({error.strerror}); choose another with --port, 0 for any") from error
    return listener


def serve(listener: socket.socket, *, browser: bool = False) -> None:
    """Answer until interrupted."""
    config = uvicorn.Config(
        application(),
        http=Impatient,
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        h11_max_incomplete_event_size=MAX_HEAD,
        limit_concurrency=MAX_CONNECTIONS,
        server_header=False,
    )
    answer.soft(read(EXAMPLE))  # the first call of a process is slower than the others
    if browser:
        webbrowser.open(address(listener))
    uvicorn.Server(config).run(sockets=[listener])


def address(listener: socket.socket) -> str:
    return f"http://{HOST}:{listener.getsockname()[1]}/"
