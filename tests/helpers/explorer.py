"""A server of the explorer on a thread of the tests, which can end and begin again on the same port."""

import socket
import threading
import time
from typing import Any

import uvicorn

from normscope.explorer.server import Settings, address, make_app

TOKEN = "a-token-of-the-tests"


class Serving:
    """Serves some sources on a port, or one that is free; ``with Serving(folder) as server: server.url``."""

    def __init__(self, *sources: object, port: int = 0) -> None:
        self.sources, self.port = tuple(map(str, sources)), port
        if not port:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port = free.getsockname()[1]
        self.url = address("127.0.0.1", self.port, TOKEN)

    def start(self) -> None:
        self.app: Any = make_app(Settings(self.sources, port=self.port, token=TOKEN))
        config = uvicorn.Config(self.app, host="127.0.0.1", port=self.port, log_level="error", timeout_graceful_shutdown=2)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 60
        while not self._server.started:
            assert self._thread.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def stop(self) -> None:
        self.app.state.ending = self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()

    def __enter__(self) -> "Serving":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
