"""Where a role's calls go: servers that share them, how fast, and with which credentials."""

from __future__ import annotations

import base64
import ipaddress
import json
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import quote, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx2
import openai

from rollout.roles.overload import Limit, Places
from rollout.settings import without_password

Clock = Callable[[], float]
"""Seconds since some moment."""

REST_S = 5.0
"""How long an address that failed comes after the others."""
MOST_BYTES = 16 * 2**20
"""Of one response; a server that sends more would fill the memory within its time limit."""
LONGEST_DETAIL = 400
"""Characters of what a server said, in a message."""


class Address:
    """One server: where it is, and how it is spoken to."""

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
        self.route = route(parts.hostname or "")
        """For openai.DefaultHttpxClient and its async twin."""

    @cached_property
    def server(self) -> openai.AsyncOpenAI:
        """Raises ValueError where the environment's proxies or certificates cannot be used."""
        try:
            # Not compressed: what is unpacked could be any length.
            bounded = openai.DefaultAsyncHttpxClient(
                event_hooks={"response": [_bound]}, headers={"Accept-Encoding": "identity"}, **self.route
            )
        except (OSError, ImportError, ValueError) as error:
            raise ValueError(
                "the environment's proxies (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY) or certificates "
                f"(SSL_CERT_FILE, SSL_CERT_DIR) cannot be used: {error}; correct or unset them"
            ) from None
        return openai.AsyncOpenAI(**self.connection, http_client=bounded)

    @property
    def proxied(self) -> bool:
        """Whether a proxy of the environment stands between."""
        parts = urlsplit(self.connection["base_url"])
        return not self.route and not proxy_bypass(parts.netloc) and not {parts.scheme, "all"}.isdisjoint(getproxies())


def route(host: str) -> dict[str, Any]:
    """How HTTP clients reach `host`: as the environment says (HTTP_PROXY and its kind, SSL_CERT_FILE), but this machine
    without a proxy, which would look for the server on its own."""
    try:
        here = ipaddress.ip_address(host).is_loopback
    except ValueError:
        here = host == "localhost" or host.endswith(".localhost")
    return {"mounts": {f"all://[{host}]" if ":" in host else f"all://{host}": None}} if here else {}


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


@dataclass(eq=False, slots=True)
class Lane:
    """A role's address and how busy it is."""

    address: Address
    limit: Limit
    in_flight: int = 0
    rests_until: float = 0.0
    closed_until: float = 0.0
    last_pick: int = 0

    @property
    def has_room(self) -> bool:
        return self.in_flight < self.limit.value


class Balancer:
    """Sends each call to the address with the fewest in flight, by turns where they are equally busy."""

    def __init__(
        self, addresses: Sequence[Address], max_in_flight: int, timeout_s: float, clock: Clock = time.monotonic
    ):
        """`max_in_flight` calls per address at most, fewer where answers take long of `timeout_s`."""
        self.lanes = [Lane(address, Limit(max_in_flight, timeout_s)) for address in addresses]
        self._clock = clock
        self._places = Places(self._room())
        self._num_picks = 0

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place in flight, at whatever address, once there is one. What was learnt meanwhile changes their number."""
        await self._places.take()
        try:
            yield
        finally:
            self.make_room()
            self._places.give_back()

    def make_room(self) -> None:
        """As many places as there are now. To call when an address is past its Retry-After, too."""
        self._places.resize(self._room())

    def _room(self) -> int:
        """Places for which it is worth to wait: not those of an address that asked for quiet, where others did not."""
        now = self._clock()
        open_lanes = [lane for lane in self.lanes if lane.closed_until <= now] or self.lanes
        return sum(lane.limit.value for lane in open_lanes)

    def pick(self, failed_at: Sequence[Lane] = ()) -> Lane:
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

    def rest(self, lane: Lane, quiet_s: float) -> None:
        """Lets the others go first for a while. `quiet_s`: how long it asked to be left alone."""
        now = self._clock()
        lane.rests_until = now + max(REST_S, quiet_s)
        lane.closed_until = max(lane.closed_until, now + quiet_s)

    def closed_s(self) -> float:
        """Seconds until an address with a free slot is past its Retry-After; 0 if one is."""
        return max(0.0, min(lane.closed_until for lane in self._free()) - self._clock())

    def _free(self) -> list[Lane]:
        """All of them where limits have fallen since the caller got its place."""
        return [lane for lane in self.lanes if lane.has_room] or self.lanes


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
