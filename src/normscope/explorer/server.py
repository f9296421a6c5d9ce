"""The server of the explorer: the page, run folders, events and models, for browsers on this machine.

FastAPI and uvicorn are imported here only.
"""

import asyncio
import errno
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

try:
    import uvicorn
    from fastapi import FastAPI, Header, Query, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
    from starlette.exceptions import HTTPException
except ImportError as error:
    from normscope.errors import MissingExtraError

    raise MissingExtraError(f"the explorer's server needs {error.name}: pip install 'normscope[explorer]'") from error

from normscope.errors import InputError
from normscope.explorer import HOST, PORT
from normscope.explorer.folders import Folders, UnknownRunError, first_view, split_sources
from normscope.explorer.model_routes import add_model_routes
from normscope.explorer.page import content_policy, explorer_data, render_explorer
from normscope.explorer.queue import BusyError, CancelledError, ModelQueue
from normscope.explorer.security import Guard, Rules, check_token, is_loopback, new_token, remembered_token
from normscope.machine.files import cache_folder

_EVERY = 1.0  # seconds between two looks at the run folders
_QUICK = 0.25  # seconds between two looks at the queue
_BEAT = 10.0  # seconds between two signs of life
_GRACE = 2  # seconds for answers that are on their way when the server ends


@dataclass(frozen=True)
class Settings:
    """What a server offers, and to whom.

    Attributes:
        sources: run folders, folders that hold them, and models as ``normscope.open`` names them.
        host: the address on which it listens; others than loopback let other machines in.
        port: 0 for any that is free.
        token: without it nothing is answered; None for a random one, which this user's servers on loopback share.
    """

    sources: tuple[str, ...] = ()
    host: str = HOST
    port: int = PORT
    token: str | None = None


def make_app(settings: Settings) -> FastAPI:
    """The application: everything but the socket. ``app.state`` has its ``token``, ``folders``, ``queue`` and ``ending``."""
    from normscope.models.open import check_model

    runs, models = split_sources(settings.sources)
    for model in models:
        check_model(model)
    folders, queue = Folders(runs), ModelQueue()
    token = _token(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        app.state.ending = True
        await asyncio.to_thread(queue.close)

    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.token, app.state.folders, app.state.queue, app.state.ending = token, folders, queue, False
    _add_page(app, models)
    _add_runs(app, folders)
    _add_events(app, folders, queue)
    add_model_routes(app, models, queue)
    for kind, status in _STATUS.items():
        app.add_exception_handler(kind, _explained(status))
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(Guard, rules=Rules(settings.host, token))
    return app


def _token(settings: Settings) -> str:
    """The token given; on loopback that of the server before, so that its pages stay connected; else a new one."""
    if settings.token is not None:
        return check_token(settings.token)
    return remembered_token(cache_folder("explorer")) if is_loopback(settings.host) else new_token()


_STATUS: Mapping[type[Exception], int] = {
    UnknownRunError: 404,
    BusyError: 503,
    InputError: 422,
    CancelledError: 409,
    MemoryError: 507,
}


def _explained(status: int) -> Callable[[Request, Exception], JSONResponse]:
    """The message of an error of the library, which is for people."""

    def answer(request: Request, error: Exception) -> JSONResponse:
        text = "cancelled" if isinstance(error, CancelledError) else str(error) or "not enough memory for this"
        return JSONResponse({"detail": text}, status)

    return answer


def _invalid(request: Request, error: Exception) -> JSONResponse:
    """The first of the wrong values, by name."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"][1:])
    if first["type"] == "json_invalid":
        return JSONResponse({"detail": "The request is no valid JSON."}, 422)
    problem = str(first["msg"]).removeprefix("Input ").removeprefix("Value error, ")
    return JSONResponse({"detail": f"{name}: {problem}" if name else problem}, 422)


def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    problem = "The server cannot read this" if error.status_code == 400 else "The server has no such thing"
    return JSONResponse({"detail": f"{problem} ({error.detail})."}, error.status_code)


def _add_page(app: FastAPI, models: Sequence[str]) -> None:
    """The page itself, with the list of runs as it is now."""

    @app.get("/")
    def page() -> HTMLResponse:
        runs, server = app.state.folders.about(), {"token": app.state.token, "models": list(models)}
        ledger = app.state.folders.ledger()
        text = render_explorer(explorer_data(runs=runs, ledger=ledger, server=server, view=first_view(runs, models)))
        policy = f"{content_policy(text)}; frame-ancestors 'none'"
        return HTMLResponse(text, headers={"content-security-policy": policy})


def _add_runs(app: FastAPI, folders: Folders) -> None:
    """The runs by id; of a watched one what is new."""

    @app.get("/api/runs")
    def runs() -> list[dict[str, Any]]:
        return folders.about()

    @app.get("/api/runs/{id}")
    def run(id: str) -> dict[str, Any]:
        return folders.data(id)

    @app.get("/api/runs/{id}/watch")
    def watch(
        id: str, epoch: str = Query("", max_length=100), after: int = Query(0, ge=0), alarms: int = Query(0, ge=0)
    ) -> dict[str, Any]:
        return folders.training(id).data(epoch, after, alarms)

    @app.get("/api/runs/{id}/heads")
    def heads(id: str, layer: int = Query(ge=0)) -> dict[str, Any]:
        return folders.training(id).heads(layer)


def _add_events(app: FastAPI, folders: Folders, queue: ModelQueue) -> None:
    """Server-sent events: which runs have grown, and what the runs of models of this page do; and the way to cancel them."""

    @app.get("/api/events")
    def events(request: Request, x_normscope_page: str = Header("", max_length=64)) -> StreamingResponse:
        return StreamingResponse(_events(app, folders, queue, request, x_normscope_page), media_type="text/event-stream")

    @app.post("/api/cancel")
    def cancel(x_normscope_page: str = Header(min_length=1, max_length=64)) -> dict[str, bool]:
        return {"cancelled": queue.cancel(x_normscope_page)}


async def _events(app: FastAPI, folders: Folders, queue: ModelQueue, request: Request, page: str) -> AsyncIterator[str]:
    """What is new, as long as the page is there and the server does not end."""
    known: dict[str, str] = await asyncio.to_thread(folders.versions)
    status, looked, sent = list[dict[str, Any]](), 0.0, 0.0
    clock = asyncio.get_running_loop().time
    yield _event(kind="ready", runs=sorted(known))
    while not app.state.ending and not await request.is_disconnected():
        if (now := queue.status(page)) != status:
            status = now
            yield _event(kind="queue", runs=now)
        if clock() - looked >= _EVERY:
            versions, looked = await asyncio.to_thread(folders.versions), clock()
            if list(versions) != list(known):
                yield _event(kind="runs")
            for id in (id for id in versions if versions[id] != known.get(id)):
                yield _event(kind="grown", run=id)
            known = versions
        if clock() - sent >= _BEAT:
            sent = clock()
            yield _event(kind="alive")
        await asyncio.sleep(_QUICK)


def _event(**message: Any) -> str:
    return f"data: {json.dumps(message)}\n\n"


def serve(settings: Settings, on_ready: Callable[[str, str], None]) -> None:
    """Serve until Ctrl-C.

    Args:
        settings: what is offered, and to whom.
        on_ready: called once, when the page can be opened, with its address and with what other machines can reach: a text
            that is empty for a server on loopback.
    """
    app = make_app(settings)
    listening = _listen(settings)
    port = listening.getsockname()[1]
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=_GRACE, lifespan="on"
    )

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                on_ready(address(settings.host, port, app.state.token), exposed(settings))

        def handle_exit(self, sig: int, frame: Any) -> None:
            app.state.ending = True  # streams end first: the server waits for them
            super().handle_exit(sig, frame)

    with listening:
        try:
            Server(config).run(sockets=[listening])
        except KeyboardInterrupt:  # the signal that ended it, once more
            return


def address(host: str, port: int, token: str) -> str:
    """Where a browser finds the page."""
    name = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/?token={token}"


def exposed(settings: Settings) -> str:
    """What other machines can reach, in words; nothing of a server on loopback."""
    if is_loopback(settings.host):
        return ""
    runs, models = (", ".join(names) for names in split_sources(settings.sources))
    offers = (f"the run folders {runs}" if runs else "", f"prompts to {models}, which run on this machine" if models else "")
    what = " and ".join(filter(None, offers)) or "the page, which holds no data of this machine"
    return (
        f"host={settings.host} lets other machines in: whoever has the address with its token reaches {what}. "
        "The connection is not encrypted; over an untrusted network use an SSH tunnel and the usual host instead."
    )


def _listen(settings: Settings) -> socket.socket:
    """A socket on the address; a port that is taken, or an address that is not this machine's, is refused."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise InputError(f"host='{settings.host}' is no address of this machine: {error}; leave it out for {HOST}") from error
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart need not wait for old connections
        listening.bind(place)
        listening.listen(128)
    except (OSError, OverflowError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or str(error)
        if isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL:
            raise InputError(f"host='{settings.host}' is no address of this machine; leave it out for {HOST}") from error
        raise InputError(
            f"port={settings.port} cannot be used: {reason}; choose another port=, or port=0 for any that is free"
        ) from error
    return listening


__all__ = ["Settings", "address", "exposed", "make_app", "serve"]
