"""The routes of open models: a page asks, the queue runs the model, ``ModelSession`` computes.

FastAPI is imported here and in the server only.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Header, Request
from pydantic import BaseModel, Field

from normscope.errors import InputError
from normscope.explorer.queue import BusyError, CancelledError, ModelQueue, ModelRun
from normscope.explorer.security import MOST_PROMPT
from normscope.explorer.session import MOST_NOISE, Check, ModelSession

_IDLE = 1.0  # seconds without a question until the background goes on


class NoiseAsked(BaseModel):
    """Relative noise on norms: its RMS, what it is put on, the layer (None for all), and which draw of it."""

    level: float = Field(0.0, ge=0, le=MOST_NOISE)
    parts: str = Field("qkm", max_length=4)
    layer: int | None = None
    draw: int = Field(0, ge=0, le=10**6)


class Asked(BaseModel):
    """What a page asks of a model: a prompt, and what of it is chosen; ``token`` counts from 0, or from the end if negative."""

    prompt: str = Field("", max_length=MOST_PROMPT)
    layer: int = 0
    head: int = Field(0, ge=0)
    token: int = -1
    noise: NoiseAsked | None = None


class OpenModels:
    """The models that a server was given, each opened when it is first asked; then its weights are probed in the background."""

    def __init__(self, names: Sequence[str], queue: ModelQueue) -> None:
        self.names, self.queue = tuple(names), queue
        self._sessions: dict[int, ModelSession] = {}
        self._done: dict[int, tuple[int, int]] = {}
        self.asked = 0.0  # when a page last asked, in seconds

    def session(self, number: int, run: ModelRun[Any]) -> ModelSession:
        """The session of a model; called in the queue."""
        from normscope.models import open_model

        if number not in self._sessions:
            run.report(f"opening {self.names[number]}")
            self._sessions[number] = ModelSession(open_model(self.names[number]))
            steps = self._sessions[number].background()
            threading.Thread(target=self._probe, args=(number, steps), name="normscope probes", daemon=True).start()
        run.report("")
        return self._sessions[number]

    def check(self, number: int) -> None:
        """Refuse the number of no model."""
        if not 0 <= number < len(self.names):
            raise InputError("there is no such model: open the page again")

    def about(self) -> list[dict[str, Any]]:
        """Every model with its name, whether it is open, and how much of its weights is probed."""
        return [
            {"id": number, "name": name, "open": number in self._sessions, "probed": list(self._done.get(number, (0, 0)))}
            for number, name in enumerate(self.names)
        ]

    def _probe(self, number: int, steps: Sequence[Callable[[Check], None]]) -> None:
        """Run steps one by one in the queue, where alone models are touched, and only while no page asks for anything."""
        for done, step in enumerate(steps):
            self._done[number] = done, len(steps)
            while not self._run(step):
                if self.queue.closed:
                    return
                time.sleep(_IDLE / 2)
        self._done[number] = len(steps), len(steps)

    def _run(self, step: Callable[[Check], None]) -> bool:
        """Whether a step was run to its end: it gives way to a page that waits."""

        def give_way() -> None:
            if self.queue.waiting:
                raise CancelledError

        if time.monotonic() - self.asked < _IDLE:
            return False
        try:
            self.queue.submit(lambda run: step(give_way)).future.result()
        except (BusyError, CancelledError):
            return False
        return True


def add_model_routes(app: FastAPI, names: Sequence[str], queue: ModelQueue) -> None:
    """Add the routes of models to an application; ``names`` are what ``normscope.open`` takes."""
    models = OpenModels(names, queue)

    @app.get("/api/models")
    def about() -> list[dict[str, Any]]:
        return models.about()

    def add(purpose: str, answer: Callable[[ModelSession, Asked, Callable[[], None]], dict[str, Any]], name: str) -> None:
        @app.post(f"/api/models/{{number}}/{name}")
        async def route(
            number: int, asked: Asked, request: Request, x_normscope_page: str = Header("", max_length=64)
        ) -> dict[str, Any]:
            models.check(number)
            models.asked = time.monotonic()
            kind = f"{number} {purpose}"
            return await queue.result(
                request, lambda run: answer(models.session(number, run), asked, run.check), x_normscope_page, kind
            )

    # A newer question of the same purpose cancels an older one: whoever types on does not wait for what was typed before.
    add("prompt", lambda session, asked, check: session.read(asked.prompt, check), "read")
    add("prompt", lambda session, asked, check: session.later(asked.prompt, check), "later")
    add("head", lambda session, asked, check: session.head(asked.prompt, asked.layer, asked.head, _noise(asked), check), "head")
    add(
        "words", lambda session, asked, check: session.words(asked.prompt, asked.layer, asked.head, asked.token, check), "words"
    )
    add("token", lambda session, asked, check: session.token(asked.prompt, asked.token, check), "token")
    add("noise", lambda session, asked, check: session.noise(asked.prompt, _noise(asked) or {}, asked.token, check), "noise")


def _noise(asked: Asked) -> dict[str, Any] | None:
    return None if asked.noise is None else asked.noise.model_dump()
