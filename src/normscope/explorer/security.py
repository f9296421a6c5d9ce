"""What every request passes before anything reads it: names of this machine, the token, sizes, and the headers of answers.

A page of another site can make a browser send requests to this machine, also under a name of its own that resolves to
127.0.0.1 (DNS rebinding). It can neither choose the ``Host`` that the browser sends nor know the token.
"""

import ipaddress
import json
import re
import secrets
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from normscope.errors import InputError
from normscope.machine.files import write_private

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

TOKEN = "x-normscope-token"  # the header with the token; only the page itself is opened with one in its URL
MOST_BODY = 256 << 10  # bytes of a request
MOST_PROMPT = 8_000  # characters of a prompt
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_SHORTEST = 16  # characters of a token that somebody chose
_TOKEN_FORM = re.compile(r"[A-Za-z0-9_-]+")
_PAGE_POLICY = "default-src 'none'; style-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_HEADERS = {
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",  # the token is in the URL
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
_CLOSED = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>normscope explore</title></head>
<body><h1>This address needs its token</h1>
<p>Open the address that <code>normscope explore</code> printed when it started: it ends in <code>?token=…</code>.
On this machine the token stays the same; with <code>--host</code> every start has another one, unless <code>--token</code>
gives it.</p></body></html>
"""


def new_token() -> str:
    """A token that nobody guesses."""
    return secrets.token_urlsafe(24)


def remembered_token(folder: Path) -> str:
    """The token of earlier servers of this user, so that an open page finds a server that was started again; else a new one."""
    place = folder / "token"
    try:
        token = check_token(place.read_text(encoding="utf-8"))
        if place.stat().st_mode & 0o077 == 0:
            return token
    except (OSError, ValueError, InputError):
        pass
    token = new_token()
    with suppress(OSError):  # without a cache it is another one next time
        write_private(place, token)
    return token


def check_token(token: str) -> str:
    """A token that a user chose: long enough, and without characters that an address would change."""
    if len(token) < _SHORTEST or _TOKEN_FORM.fullmatch(token) is None:
        raise InputError(f"token: should have {_SHORTEST} or more letters, digits, '-' and '_'; leave it out for a random one")
    return token


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Rules:
    """What a request must have.

    Attributes:
        host: where the server listens; beyond loopback, any IP address and the names of this machine are accepted.
        token: what every request must carry.
        policy: the Content-Security-Policy of answers, which the page replaces with its own.
    """

    host: str
    token: str
    policy: str = _PAGE_POLICY

    def accepts_host(self, header: str) -> bool:
        """Whether ``Host`` is a name of this machine; ports differ where one is forwarded."""
        name = _name_of(header)
        if name is None:
            return False
        if name in _LOOPBACK or name == self.host.lower():
            return True
        if is_loopback(self.host):
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in {socket.gethostname().lower(), socket.getfqdn().lower()}
        return True  # a name of another site is no address

    def accepts_token(self, given: str) -> bool:
        """Whether the token is the right one; the time that this takes does not depend on it."""
        return secrets.compare_digest(given.encode(), self.token.encode())


def _name_of(header: str) -> str | None:
    """The name in ``Host``, in lower case; None for what is no host."""
    try:
        parts = urlsplit(f"//{header}")
        _ = parts.port
    except ValueError:
        return None
    return parts.hostname if header and parts.netloc == header and "@" not in header else None


class Guard:
    """ASGI middleware: refuses requests that break a rule, and adds headers to every answer.

    A bug in what it protects is a traceback on stderr, and one sentence for the page.
    """

    def __init__(self, app: Application, rules: Rules) -> None:
        self.app, self.rules = app, rules

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # there are no web sockets
            await send({"type": "websocket.close", "code": 1008})
            return
        answer = _Answer(send, self.rules.policy)
        refused = self._refusal(scope)
        if refused is not None:
            await answer.whole(*refused)
            return
        try:
            await self.app(scope, answer.limited(receive), answer.send)
        except Exception:
            traceback.print_exc(file=sys.stderr)
            await answer.error(500, "This is a bug in normscope: the terminal of the server has its traceback.")

    def _refusal(self, scope: Mapping[str, Any]) -> tuple[int, str, str] | None:
        """Status, kind and text of the answer to a request that breaks a rule."""
        hosts, headers = [], dict[str, str]()
        for name, value in scope["headers"]:
            headers[name.decode("latin-1").lower()] = value.decode("latin-1")
            hosts += [value.decode("latin-1")] if name.lower() == b"host" else []
        if len(hosts) != 1 or not self.rules.accepts_host(hosts[0]):
            return _refused(403, "This server answers only under the names of its own machine.")
        if not _same_origin(headers, hosts[0], page=scope["path"] == "/"):
            return _refused(403, "This server answers only to its own page.")
        if scope["path"] == "/":
            asked = dict(parse_qsl(scope["query_string"].decode("latin-1")))
            if not self.rules.accepts_token(asked.get("token", "")):
                return 403, "text/html; charset=utf-8", _CLOSED
        elif not self.rules.accepts_token(headers.get(TOKEN, "")):
            return _refused(403, "The token is missing or wrong: open the address that normscope explore printed.")
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or int(length) > MOST_BODY:
            return _refused(413, _too_large())
        return None


def _same_origin(headers: Mapping[str, str], host: str, *, page: bool) -> bool:
    """Whether a request comes from the page itself, or from no page; the page may be opened from anywhere."""
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not page:
        return False
    if "origin" not in headers:
        return True
    return headers["origin"].lower() in (f"http://{host.lower()}", f"https://{host.lower()}")


def _refused(status: int, text: str) -> tuple[int, str, str]:
    return status, "application/json", json.dumps({"detail": text})


def _too_large() -> str:
    return f"A request has at most {MOST_BODY >> 10} kB."


class _Answer:
    """What is sent, with the headers of every answer; an answer that has begun cannot become an error."""

    def __init__(self, send: Send, policy: str) -> None:
        self._send, self._begun, self._received = send, False, 0
        self._headers = {**_HEADERS, "content-security-policy": policy}

    def limited(self, receive: Receive) -> Receive:
        """The same body, as far as it is allowed; whatever is made of a longer one, the answer is that it is too long."""

        async def limited() -> Message:
            message = await receive()
            self._received += len(message.get("body", b""))
            return message if self._received <= MOST_BODY else {"type": "http.request", "body": b"", "more_body": False}

        return limited

    async def send(self, message: Message) -> None:
        """Send a part of the answer."""
        if self._received > MOST_BODY:
            await self.error(413, _too_large())
        else:
            await self._pass(message)

    async def _pass(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._begun = True
            given = {name.decode("latin-1").lower() for name, _ in message.get("headers", ())}
            added = [(name.encode(), value.encode()) for name, value in self._headers.items() if name not in given]
            message = {**message, "headers": [*message.get("headers", ()), *added]}
        await self._send(message)

    async def whole(self, status: int, kind: str, text: str) -> None:
        """Send all of an answer."""
        body = text.encode()
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        await self._pass({"type": "http.response.start", "status": status, "headers": headers})
        await self._pass({"type": "http.response.body", "body": body})

    async def error(self, status: int, text: str) -> None:
        """Say what is wrong, unless something was sent; then the answer ends without its last part, which the page notices."""
        if not self._begun:
            await self.whole(*_refused(status, text))


__all__ = ["MOST_BODY", "MOST_PROMPT", "TOKEN", "Guard", "Rules", "check_token", "is_loopback", "new_token", "remembered_token"]
