"""Runs of models, one at a time: a queue with a limit, where a newer run takes the place of an older one of the same page."""

import asyncio
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from normscope.errors import InputError

Value = TypeVar("Value")
_LIMIT = 8  # runs that wait
_LOOK = 0.2  # seconds between two looks at whether the page is still there
_PATIENCE = 5.0  # seconds that closing waits for a run to notice


class CancelledError(Exception):
    """The run was cancelled: by the page, by a newer run of it, or because the page is gone."""


class BusyError(InputError):
    """Too many runs wait."""


class Request(Protocol):
    """What is used of an HTTP request."""

    async def is_disconnected(self) -> bool:
        """Whether nobody waits for the answer any more."""


class ModelRun(Generic[Value]):
    """A function that runs, or waits to run; it is called with this object and calls it between layers.

    ``run()`` is whether it was cancelled, ``run.report("layer 3 of 30")`` is shown on the page.
    """

    def __init__(self, function: "Callable[[ModelRun[Value]], Value]", page: str, purpose: str) -> None:
        self.page, self.purpose, self.text = page, purpose, ""
        self.future: Future[Value] = Future()
        self.future.set_running_or_notify_cancel()  # only this object ends it
        self._function, self._cancelled = function, threading.Event()

    def __call__(self) -> bool:
        """Whether it was cancelled."""
        return self._cancelled.is_set()

    def report(self, text: str) -> None:
        """What it does now."""
        self.text = text

    def check(self) -> None:
        """End here if it was cancelled."""
        if self():
            raise CancelledError

    def cancel(self) -> None:
        """Ask the function to end."""
        self._cancelled.set()

    def execute(self) -> None:
        """Call the function; what it raises, also a bug, is raised where the result is awaited."""
        try:
            self.check()
            value = self._function(self)
            self.check()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(value)


class ModelQueue:
    """Runs functions one after the other on a thread of its own."""

    def __init__(self, limit: int = _LIMIT) -> None:
        self.limit = limit
        self._waiting: deque[ModelRun[Any]] = deque()
        self._running: ModelRun[Any] | None = None
        self._changed, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._work, name="normscope model runs", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[ModelRun[Value]], Value], page: str = "", purpose: str = "") -> ModelRun[Value]:
        """Let a function run once those before it are done; an older run of the same page and purpose is cancelled."""
        run = ModelRun(function, page, purpose)
        with self._changed:
            if page:
                self._cancel(page, purpose)
            if len(self._waiting) >= self.limit or self._closed:
                raise BusyError(f"the model is busy: {len(self._waiting)} requests wait already; try again in a moment")
            self._waiting.append(run)
            self._changed.notify_all()
        return run

    async def result(
        self, request: Request, function: Callable[[ModelRun[Value]], Value], page: str = "", purpose: str = ""
    ) -> Value:
        """The value of a function that runs for a request; it is cancelled when nobody waits for the answer any more."""
        run = self.submit(function, page, purpose)
        future = asyncio.wrap_future(run.future)
        try:
            while not (await asyncio.wait({future}, timeout=_LOOK))[0]:
                if await request.is_disconnected():
                    raise CancelledError
            return future.result()
        except (CancelledError, asyncio.CancelledError):
            future.add_done_callback(
                lambda done: done.cancelled() or done.exception()
            )  # so that asyncio reports nothing itself
            self._drop(run)
            raise

    def cancel(self, page: str, purpose: str | None = None) -> bool:
        """Cancel the runs of a page, or those of one purpose; whether there were any."""
        with self._changed:
            return self._cancel(page, purpose)

    def status(self, page: str) -> list[dict[str, Any]]:
        """The runs of a page: how many run or wait before each, and what it does."""
        with self._changed:
            runs = [*([self._running] if self._running else ()), *self._waiting]
        return [
            {"purpose": run.purpose, "before": place, "text": run.text} for place, run in enumerate(runs) if run.page == page
        ]

    def close(self) -> None:
        """Cancel everything, and wait a while for what runs."""
        with self._changed:
            self._closed = True
            for run in (*self._waiting, *([self._running] if self._running else ())):
                run.cancel()
            self._changed.notify_all()
        self._thread.join(_PATIENCE)

    def _cancel(self, page: str, purpose: str | None) -> bool:
        runs = [run for run in (*self._waiting, self._running) if run is not None and run.page == page]
        chosen = [run for run in runs if purpose is None or run.purpose == purpose]
        for run in chosen:
            run.cancel()
            if run in self._waiting:
                self._waiting.remove(run)
                run.future.set_exception(CancelledError())
        return bool(chosen)

    def _drop(self, run: ModelRun[Any]) -> None:
        """Cancel a run whose result nobody awaits; a bug in it is still reported."""
        with self._changed:
            run.cancel()
            if run in self._waiting:
                self._waiting.remove(run)
                run.future.set_exception(CancelledError())
        run.future.add_done_callback(_report_bug)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._running = None
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                self._running = self._waiting.popleft()
            self._running.execute()


def _report_bug(future: "Future[Any]") -> None:
    error = future.exception()
    if error is not None and not isinstance(error, CancelledError | InputError):
        traceback.print_exception(error, file=sys.stderr)
