"""A page over HTTP, for browsers on this machine: it asks for news, and fetches itself again when there are some."""

import json
import threading
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from normscope.errors import InputError

NEWS = "/news"
_HOST = "127.0.0.1"
_PATIENCE = 20.0  # seconds that a question for news waits for an answer
_NAMES = (_HOST, "localhost")  # a page of another site that resolves to this machine has another name


class PageServer:
    """Serves one page, which is replaced from time to time; a context manager."""

    def __init__(self, port: int) -> None:
        self.version, self._page, self._news = 0, b"", threading.Condition()
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                served.answer(self)

            def log_message(self, *_: Any) -> None:
                """A request is nothing to report."""

        try:
            self._server = ThreadingHTTPServer((_HOST, port), Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise InputError(
                f"port={port} cannot be used: {reason}; choose another port=, or 0 for any that is free"
            ) from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{_HOST}:{self._server.server_address[1]}/"

    @property
    def next(self) -> Mapping[str, Any]:
        """What the next page has to know in order to ask for news."""
        return {"news": NEWS, "version": self.version + 1}

    def publish(self, page: str) -> None:
        """Replace the page."""
        with self._news:
            self._page, self.version = page.encode(), self.version + 1
            self._news.notify_all()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """The page, or the number of its version once that is another than the browser has."""
        asked = urlsplit(request.path)
        if (request.headers.get("Host") or "").rpartition(":")[0] not in _NAMES:
            self._send(request, HTTPStatus.FORBIDDEN, b"", "text/plain")
        elif asked.path == "/":
            with self._news:
                self._news.wait_for(lambda: self.version > 0, _PATIENCE)  # a browser may be faster than the first page
            self._send(request, HTTPStatus.OK, self._page, "text/html; charset=utf-8")
        elif asked.path == NEWS:
            known = parse_qs(asked.query).get("after", [""])[0]
            with self._news:
                self._news.wait_for(lambda: str(self.version) != known, _PATIENCE)
            self._send(request, HTTPStatus.OK, json.dumps({"version": self.version}).encode(), "application/json")
        else:
            self._send(request, HTTPStatus.NOT_FOUND, b"", "text/plain")

    def _send(self, request: BaseHTTPRequestHandler, status: HTTPStatus, content: bytes, kind: str) -> None:
        try:
            request.send_response(status)
            request.send_header("Content-Type", kind)
            request.send_header("Content-Length", str(len(content)))
            request.send_header("Cache-Control", "no-store")
            request.end_headers()
            request.wfile.write(content)
        except ConnectionError:  # the browser has gone
            request.close_connection = True

    def __enter__(self) -> "PageServer":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
