"""The routes of open models: a page asks, the queue runs the model, ``ModelSession`` computes.

FastAPI is imported here and in the server only.
"""

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Header, Request
from pydantic import BaseModel, Field

from normscope.errors import InputError
from normscope.explorer.queue import ModelQueue, ModelRun
from normscope.explorer.security import MOST_PROMPT
from normscope.explorer.session import MOST_NOISE, ModelSession


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
    """The models that a server was given, each opened at the first request."""

    def __init__(self, names: Sequence[str], queue: ModelQueue) -> None:
        self.names, self.queue = tuple(names), queue
        self._sessions: dict[int, ModelSession] = {}

    def session(self, number: int, run: ModelRun[Any]) -> ModelSession:
        """The session of a model; called in the queue."""
        from normscope.models import open_model

        if number not in self._sessions:
            run.report(f"Opening {self.names[number]}")
            self._sessions[number] = ModelSession(open_model(self.names[number]))
        run.report("")
        return self._sessions[number]

    def check(self, number: int) -> None:
        """Refuse the number of no model."""
        if not 0 <= number < len(self.names):
            raise InputError("there is no such model: open the page again")


def add_model_routes(app: FastAPI, names: Sequence[str], queue: ModelQueue) -> None:
    """Add the routes of models to an application; ``names`` are what ``normscope.open`` takes."""
    models = OpenModels(names, queue)

    def add(purpose: str, answer: Callable[[ModelSession, Asked, Callable[[], None]], dict[str, Any]], name: str) -> None:
        @app.post(f"/api/models/{{number}}/{name}")
        async def route(
            number: int, asked: Asked, request: Request, x_normscope_page: str = Header("", max_length=64)
        ) -> dict[str, Any]:
            models.check(number)
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
