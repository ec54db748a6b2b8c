"""Where a role's calls go: servers that share them, how fast, and with which credentials."""

from __future__ import annotations

import base64
import json
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import cached_property
from urllib.parse import quote, unquote, urlsplit

import httpx2
import openai

from rollout.settings import without_password

Clock = Callable[[], float]
"""Seconds since some moment."""

REST_S = 5.0
"""How long an address that failed comes after the others."""
CHECK_TIMEOUT_S = 10.0
MOST_BYTES = 16 * 2**20
"""Of one response; a server that sends more would fill the memory within its time limit."""
LONGEST_DETAIL = 400
"""Characters of what a server said, in a message."""


class Address:
    """One server of a role: where it is, how it is spoken to, and how busy it is."""

    def __init__(self, url: str, key: str | None):
        """Credentials in `url` leave it for a header: whatever logs a request logs its URL."""
        parts = urlsplit(url)
        userinfo, at, place = parts.netloc.rpartition("@")
        password = parts.password or userinfo
        encoded = base64.b64encode(unquote(userinfo).encode()).decode()
        self.shown = without_password(url)
        """What messages may say."""
        self.secrets = {secret for secret in (key, password, unquote(password), encoded) if secret}
        self.connection = {
            "base_url": parts._replace(netloc=place).geturl(),
            "api_key": key or "none",  # not None: the package would send OPENAI_API_KEY, to whatever server this is
            "default_headers": {"Authorization": f"Basic {encoded}"} if at else {},
            "max_retries": 0,
        }
        self.in_flight = 0
        self.rests_until = self.closed_until = 0.0
        self.last_pick = 0

    @cached_property
    def server(self) -> openai.AsyncOpenAI:
        # Not compressed: what is unpacked could be any length.
        bounded = openai.DefaultAsyncHttpxClient(
            event_hooks={"response": [_bound]}, headers={"Accept-Encoding": "identity"}
        )
        return openai.AsyncOpenAI(**self.connection, http_client=bounded)

    def fault(self, section: str, model: str) -> str | None:
        """Why it cannot serve `model`, with the remedy; it is asked which models it has."""
        show = presentable(self.secrets)
        remedy = "start the role servers (bash launch/serve_roles.sh) or correct the address"
        try:
            with openai.OpenAI(**self.connection, timeout=CHECK_TIMEOUT_S) as server:
                models = [str(served.id) for served in server.models.list().data]
        except openai.APIStatusError as error:
            if error.status_code in (401, 403):
                remedy = f"set {section}.api_key_env to the environment variable that holds a valid key"
            elif error.status_code == 404:
                remedy = "correct the address, which usually ends in /v1"
            problem = f"the server answered HTTP {error.status_code}: {show(error.message)}"
        except openai.APITimeoutError:
            problem = f"the server did not answer in {CHECK_TIMEOUT_S:g} s"
        except openai.APIConnectionError as error:
            problem = f"cannot reach the server ({show(str(error.__cause__ or error))})"
        except (openai.OpenAIError, ValueError, AttributeError, TypeError, RecursionError):
            problem = "what answers there is not an OpenAI-compatible server"
        else:
            if model in models:
                return None
            return (
                f"{section}.model: {model!r} is not served at {self.shown}, which has: "
                f"{show(', '.join(models)) or 'nothing'}; name one of these, or serve that model"
            )
        return f"{section}.base_url: {self.shown}: {problem}; {remedy}"


class _Bounded(httpx2.AsyncByteStream):
    """A response's bytes, up to MOST_BYTES of them."""

    def __init__(self, stream: httpx2.AsyncByteStream):
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for part in self._stream:
            num_bytes += len(part)
            if num_bytes > MOST_BYTES:
                raise httpx2.RemoteProtocolError(f"the response is longer than {MOST_BYTES} bytes")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


async def _bound(response: httpx2.Response) -> None:
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise httpx2.RemoteProtocolError("the response is compressed, which it was asked not to be")
    response.stream = _Bounded(response.stream)


class Balancer:
    """Sends each call to the address with the fewest in flight, by turns where they are equally busy."""

    def __init__(self, addresses: Sequence[Address], max_in_flight: int, clock: Clock = time.monotonic):
        """`max_in_flight` calls per address; the caller never asks for more than all of them together."""
        self.addresses = addresses
        self._max_in_flight = max_in_flight
        self._clock = clock
        self._num_picks = 0

    def pick(self, failed_at: Sequence[Address] = ()) -> Address:
        """The next address, one that did not ask for quiet and that this question has not failed at where there is one.

        An address that lately failed any question comes after the others: it answers its calls the
        fastest, with errors, and would be given the most.
        """
        now = self._clock()
        chosen = min(
            self._free(),
            key=lambda a: (a.closed_until > now, failed_at.count(a), a.rests_until > now, a.in_flight, a.last_pick),
        )
        self._num_picks += 1
        chosen.last_pick = self._num_picks
        return chosen

    def rest(self, address: Address, quiet_s: float) -> None:
        """Lets the others go first for a while. `quiet_s`: how long it asked to be left alone."""
        now = self._clock()
        address.rests_until = now + max(REST_S, quiet_s)
        address.closed_until = max(address.closed_until, now + quiet_s)

    def closed_s(self) -> float:
        """Seconds until an address with a free slot is past its Retry-After; 0 if one is."""
        return max(0.0, min(address.closed_until for address in self._free()) - self._clock())

    def _free(self) -> list[Address]:
        return [address for address in self.addresses if address.in_flight < self._max_in_flight]


class Pace:
    """Spaces requests evenly, `per_minute` of them (None: no limit)."""

    def __init__(self, per_minute: int | None, clock: Clock = time.monotonic):
        self._spacing_s = 60.0 / per_minute if per_minute else 0.0
        self._clock = clock
        self._next = float("-inf")

    def take(self) -> float:
        """Takes the next turn; the seconds until it comes."""
        now = self._clock()
        turn = max(now, self._next)
        self._next = turn + self._spacing_s
        return turn - now


def read_key(section: str, variable: str | None) -> str | None:
    """The key in an environment variable. Raises ValueError, which never shows it, where there is none."""
    if variable is None:
        return None
    setting = f"{section}.api_key_env"
    if not re.fullmatch(r"[A-Za-z_]\w*", variable):  # not echoed: it may be a key itself
        raise ValueError(f"{setting}: is not the name of an environment variable; put the key into one, and name it")
    key = os.environ.get(variable, "").strip()  # keys read from files end in a newline
    if not key:
        raise ValueError(
            f"{setting}: the environment variable {variable} is not set; "
            f"export it, or set api_key_env to null for a server without a key"
        )
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"{setting}: the environment variable {variable} holds characters that no key has")
    return key


def presentable(secrets: Iterable[str]) -> Callable[[str], str]:
    """Makes what a server said fit for messages and logs: *** for secrets, no control characters, not too long."""
    quotings = (str, lambda s: json.dumps(s)[1:-1], lambda s: repr(s)[1:-1], lambda s: quote(s, safe=""))
    forms = {quoting(secret) for secret in secrets for quoting in quotings}
    longest_first = sorted(forms, key=len, reverse=True)  # a long one may hold a short one

    def present(text: str) -> str:
        for form in longest_first:
            text = text.replace(form, "***")
        return "".join(character if character.isprintable() else " " for character in text[:LONGEST_DETAIL])

    return present
