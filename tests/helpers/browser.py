"""A headless Chromium for tests: spoken to over its DevTools protocol through a pipe, one JSON message at a time."""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # which root cannot use
    "--disable-dev-shm-usage",
    "--enable-unsafe-swiftshader",  # WebGL without a graphics card
    "--no-first-run",
    "--disable-background-networking",
)
_PATIENCE = 300.0  # seconds until a browser that hangs is ended


class Browser:
    """One tab of a running Chromium."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = os.fdopen(commands, "wb"), os.fdopen(answers, "rb")
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command; events that come before it are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        self._commands.write(json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode() + b"\0")
        self._commands.flush()
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, (method, answer)
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, page: Path) -> None:
        """Load a file and wait until it is drawn; what happened on the page before is forgotten."""
        self.events.clear()
        assert "errorText" not in self.send("Page.navigate", url=page.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())
        self.settle()

    def settle(self) -> None:
        """Let the page draw what it has to."""
        self.run("new Promise(drawn => requestAnimationFrame(() => setTimeout(drawn, 50)))")

    def run(self, script: str) -> Any:
        """The value of an expression in the page, waited for if it is a promise."""
        answer = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def look(self, scheme: str = "light", width: int = 1200, media: str = "") -> None:
        """Show pages in a colour scheme, at a width, and as on a medium."""
        self.send("Emulation.setEmulatedMedia", media=media, features=[{"name": "prefers-color-scheme", "value": scheme}])
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 700}
        self.send("Emulation.setDeviceMetricsOverride", **size)

    def picture(self, *, whole: bool = False) -> bytes:
        """The window, or the whole page, as PNG."""
        return base64.b64decode(self.send("Page.captureScreenshot", captureBeyondViewport=whole)["data"])

    @property
    def errors(self) -> list[str]:
        """What the page complained about, in its console or elsewhere."""
        complaints = []
        for event in self.events:
            what, about = event["method"], event["params"]
            level = about.get("type") if what == "Runtime.consoleAPICalled" else about.get("entry", {}).get("level")
            if what in {"Runtime.exceptionThrown", "Network.loadingFailed"} or level in {"error", "assert"}:
                complaints.append(json.dumps(about))
        return complaints

    @property
    def loaded(self) -> list[str]:
        """The addresses that the page asked for."""
        return [event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._answers.fileno(), 1 << 20)
            assert piece, "Chromium has gone, or took too long"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        content: dict[str, Any] = json.loads(message)
        return content


@contextmanager
def chromium() -> Iterator[Browser]:
    """A Chromium with a profile of its own, gone at the end."""
    assert CHROMIUM is not None
    read_command, write_command = os.pipe()
    read_answer, write_answer = os.pipe()
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        pipe = f'exec "$@" 3<&{read_command} 4>&{write_answer}'  # the descriptors that the protocol speaks on
        process = subprocess.Popen(
            ["bash", "-c", pipe, "bash", CHROMIUM, *_FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(read_command, write_answer),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_command)
        os.close(write_answer)
        watch = Timer(_PATIENCE, process.kill)
        watch.start()
        try:
            yield Browser(write_command, read_answer)
        finally:
            watch.cancel()
            process.kill()
            process.wait()
