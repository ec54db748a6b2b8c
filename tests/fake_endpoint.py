"""A small OpenAI-compatible server for tests: real HTTP on a free port, answers and faults by program."""

from __future__ import annotations

import json
import socket
import ssl
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

from rollout.roles.check import SAMPLE_REPLY

MODEL = "fake-model"


@dataclass(frozen=True)
class Answer:
    """What the server sends back: a chat completion, or `raw` bytes in its place.

    `fault` is what goes wrong on the way: `broken_off` closes the connection in the middle, `reset` drops it without a
    word, `endless` sends bytes until the client has had enough.
    """

    content: str = "{}"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    finish_reason: str = "stop"
    raw: bytes | None = None
    content_type: str = "application/json"
    fault: Literal["broken_off", "reset", "endless"] | None = None


def error(status: int, message: str = "no", **headers: str) -> Answer:
    body = json.dumps({"error": {"message": message}}).encode()
    return Answer(status=status, raw=body, headers={name.replace("_", "-"): text for name, text in headers.items()})


def says(answer: Any, **more: Any) -> Answer:
    """A model that answers with this object."""
    return Answer(content=json.dumps(answer, ensure_ascii=False), **more)


def is_check(body: dict[str, Any]) -> bool:
    """Whether it is the question that a role's server is asked before a run."""
    return SAMPLE_REPLY in body["messages"][0]["content"]


class FakeEndpoint:
    """`answers` are sent in order, the last one for ever; a callable makes one from the request's body.

    `stop` and `start` let it die and come back at the same port.

    `requests` are the chat requests' bodies as received, `keys` their Authorization headers, and
    `most_at_once` is the largest number of them that were being answered at the same time.
    """

    def __init__(
        self,
        *answers: Answer | Callable[[dict[str, Any]], Answer],
        models: Any = (MODEL,),
        tls: ssl.SSLContext | None = None,
    ):
        self.answers = list(answers)
        self.models = models
        self.tls = tls
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        self._port = 0  # any free one, and the same again after that

    def __enter__(self) -> FakeEndpoint:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        endpoint = self

        class Handler(_Handler):
            owner = endpoint

        self._server = _Server(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_address[1]
        if self.tls:
            self._server.socket = self.tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def stop(self) -> None:
        self._server.stopped.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def base_url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self._port}/v1"

    def listing(self) -> Answer:
        if isinstance(self.models, Answer):
            return self.models
        return Answer(raw=json.dumps({"object": "list", "data": [{"id": name} for name in self.models]}).encode())

    def answer(self, body: dict[str, Any], key: str | None) -> Answer:
        with self._lock:
            self.requests.append(body)
            self.keys.append(key)
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            if callable(answer):
                answer = answer(body)
            return Answer(fault="reset") if self._server.stopped.wait(answer.delay_s) else answer
        finally:
            with self._lock:
                self._at_once -= 1


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.stopped = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        # Of a client that left, or that does not trust the certificate: as the tests want.
        if not isinstance(sys.exc_info()[1], ConnectionError | ssl.SSLError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    owner: FakeEndpoint
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes, and the second would wait for 40 ms

    def do_GET(self) -> None:
        self._send(self.owner.listing() if self.path == "/v1/models" else error(404))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.stopped.is_set():  # an old connection to a dead server
            self._reset()
            return
        known = self.path == "/v1/chat/completions"
        self._send(self.owner.answer(body, self.headers["Authorization"]) if known else error(404))

    def _send(self, answer: Answer) -> None:
        payload = answer.raw if answer.raw is not None else json.dumps(_completion(answer)).encode()
        if answer.fault == "reset":
            self._reset()
            return
        try:
            self.send_response(answer.status)
            for name, text in {"Content-Type": answer.content_type, **answer.headers}.items():
                self.send_header(name, text)
            length = {"broken_off": 2 * len(payload), "endless": 10**12}.get(answer.fault, len(payload))
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(payload)
            while answer.fault == "endless" and not self.server.stopped.wait(0.01):
                self.wfile.write(b"\xff\x00{" * 300)
            self.close_connection |= answer.fault is not None
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client stopped waiting, as the timeout tests want

    def _reset(self) -> None:
        """Not the usual goodbye of TCP: with a linger of 0 seconds the client's read fails."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


def _completion(answer: Answer) -> dict[str, Any]:
    message = {"role": "assistant", "content": answer.content}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [{"index": 0, "finish_reason": answer.finish_reason, "message": message}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
    }
