"""Signals that end a process: raised as exceptions, so that work cleans up after itself, and never lost."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_DEFAULTS: dict[int, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
_AGAIN = 0.1  # seconds until an exception is raised again that has not left the block
_PATIENCE = 10.0  # seconds for cleaning up before a second signal interrupts that too


class Terminated(SystemExit):
    """SIGTERM or SIGHUP; the exit status is 128 and the signal's number, as of any terminated command."""


class _Arrived:
    """The first signal of a block, and when it came."""

    number: int | None = None
    at: float = 0.0


@contextmanager
def raising_signals() -> Iterator[None]:
    """Raise SIGINT as KeyboardInterrupt, SIGTERM and SIGHUP as ``Terminated``, and leave the block with it for certain.

    Python prints and drops an exception that is raised inside a weakref callback or ``__del__``, where a handler may happen to
    run, and foreign code may catch it. So it is raised again until it leaves the block, but not while it is being handled:
    cleaning up is not interrupted. Signals that are ignored (nohup) or have handlers of a caller stay as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = [number for number, default in _DEFAULTS.items() if signal.getsignal(number) == default]
    if not taken:
        yield
        return
    report = sys.unraisablehook
    arrived, repeated = _Arrived(), signal.getsignal(signal.SIGALRM) == signal.SIG_DFL

    def on_signal(number: int, frame: FrameType | None) -> None:
        late = arrived.number is not None and time.monotonic() - arrived.at > _PATIENCE
        if arrived.number is None:
            arrived.number, arrived.at = number, time.monotonic()
            if repeated:
                signal.setitimer(signal.ITIMER_REAL, _AGAIN, _AGAIN)
        if late or not _is_leaving():
            raise _exception(arrived.number)

    def on_alarm(number: int, frame: FrameType | None) -> None:
        if arrived.number is not None and not _is_leaving():
            raise _exception(arrived.number)

    def on_dropped(dropped: Any) -> None:
        if not isinstance(dropped.exc_value, KeyboardInterrupt | Terminated):  # which come again
            report(dropped)

    try:
        sys.unraisablehook = on_dropped
        if repeated:
            signal.signal(signal.SIGALRM, on_alarm)
        for number in taken:
            signal.signal(number, on_signal)
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        if arrived.number is not None:  # what a library made of it
            raise _exception(arrived.number) from error
        raise
    finally:
        with holding_signals():
            sys.unraisablehook = report
            if repeated:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
            for number in taken:
                signal.signal(number, _DEFAULTS[number])
    if arrived.number is not None:
        raise _exception(arrived.number)


@contextmanager
def holding_signals() -> Iterator[None]:
    """Hold back the signals that end a process until a few renames are done.

    A process that is started meanwhile holds them back too, until it calls ``release_signals``.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {*_DEFAULTS, signal.SIGALRM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def release_signals() -> None:
    """Take, in a process that was started within ``holding_signals``, the signals that end it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*_DEFAULTS, signal.SIGALRM})


@contextmanager
def keeping_handlers() -> Iterator[None]:
    """Undo, at the end of the block, what a library does to the signals that end a process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in _DEFAULTS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # one that is not Python's cannot be set again
                signal.signal(number, handler)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the process without any cleaning up, as before ``raising_signals``."""
    with keeping_handlers():
        if threading.current_thread() is threading.main_thread():
            for number, default in _DEFAULTS.items():
                if default == signal.SIG_DFL and signal.getsignal(number) != signal.SIG_IGN:
                    signal.signal(number, default)
        yield


def _exception(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated(128 + number)


def _is_leaving() -> bool:
    """Whether an exception that ends the process is being handled now, by ``except``, ``finally`` or ``with``."""
    error = sys.exception()
    while error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
        error = error.__context__
    return error is not None
