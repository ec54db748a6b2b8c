"""Proxies and certificates of the environment: heeded for servers elsewhere, and no proxy for those of this machine."""

from __future__ import annotations

import http.client
import os
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from rollout.roles.check import check_role
from rollout.roles.endpoints import Address, route
from rollout.roles.question import Question
from rollout.settings import EndpointSettings
from tests.asking import GOOD, QUESTION, SCHEMA, ask, client_of, failure_of
from tests.fake_endpoint import MODEL, FakeEndpoint

ELSEWHERE = "http://judge.invalid:8002/v1"


class Proxy(ThreadingHTTPServer):
    """Sends every request on to one server, whatever host it was for, and keeps the addresses it was given."""

    daemon_threads = True

    def __init__(self, target: str):
        super().__init__(("127.0.0.1", 0), _Forward)
        self.target = urlsplit(target).netloc
        self.asked_for: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Forward(BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.asked_for.append(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        onward = http.client.HTTPConnection(self.server.target, timeout=10)
        onward.request(self.command, urlsplit(self.path).path, body, {"Content-Type": "application/json"})
        answer = onward.getresponse()
        payload = answer.read()
        onward.close()
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.headers["Content-Type"])
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def proxy_to(target: str) -> Iterator[Proxy]:
    with Proxy(target) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield proxy
        proxy.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.lower().endswith("_proxy") or name.startswith("SSL_CERT_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_a_server_elsewhere_is_asked_through_the_proxy_of_the_environment(variable: str, monkeypatch):
    with FakeEndpoint(GOOD) as endpoint, proxy_to(endpoint.base_url) as proxy:
        monkeypatch.setenv(variable, proxy.url)
        settings = EndpointSettings(base_url=ELSEWHERE, model=MODEL)
        assert check_role("judge", settings, Question(QUESTION, SCHEMA)) == []
        assert ask(client_of(endpoint, base_url=ELSEWHERE), times=3) == [{"score": 0.5}] * 3
        assert proxy.asked_for == [f"{ELSEWHERE}/models"] + [f"{ELSEWHERE}/chat/completions"] * 4


def test_this_machine_is_never_asked_through_a_proxy(monkeypatch):
    with FakeEndpoint(GOOD) as endpoint, proxy_to(endpoint.base_url) as proxy:
        for variable in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(variable, proxy.url)
        for address in (endpoint.base_url, endpoint.base_url.replace("127.0.0.1", "localhost")):
            settings = EndpointSettings(base_url=address, model=MODEL)
            assert check_role("judge", settings, Question(QUESTION, SCHEMA)) == []
            assert ask(client_of(endpoint, base_url=address)) == [{"score": 0.5}]
        assert proxy.asked_for == []


def test_no_proxy_names_servers_elsewhere_that_are_asked_without_one(monkeypatch):
    with FakeEndpoint(GOOD) as endpoint, proxy_to(endpoint.base_url) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        monkeypatch.setenv("NO_PROXY", "judge.invalid")
        client = client_of(endpoint, base_url=ELSEWHERE, max_attempts=1, timeout_s=0.3)
        assert failure_of(client).kind in ("connection", "timeout")  # there is no such host
        assert proxy.asked_for == []


def test_hosts_of_this_machine_by_their_names_and_numbers():
    for host in ("127.0.0.1", "127.8.9.1", "localhost", "judge.localhost"):
        assert route(host) == {"mounts": {f"all://{host}": None}}
    assert route("::1") == {"mounts": {"all://[::1]": None}}
    for host in ("10.0.0.1", "judge", "localhost.example", "fe80::1"):
        assert route(host) == {}


def test_where_a_proxy_fails_it_is_said_that_there_is_one(monkeypatch):
    with FakeEndpoint(GOOD) as endpoint, proxy_to(endpoint.base_url) as proxy:
        gone = proxy.url
    monkeypatch.setenv("HTTP_PROXY", gone)
    with pytest.raises(ValueError, match="cannot reach the server .* through the proxy that the environment names"):
        check_role("judge", EndpointSettings(base_url=ELSEWHERE, model=MODEL), Question(QUESTION, SCHEMA))
    monkeypatch.setenv("NO_PROXY", "judge.invalid")
    assert not Address(ELSEWHERE, None).proxied and not Address("http://127.0.0.1/v1", None).proxied


@pytest.mark.parametrize(
    ("variable", "value"), [("HTTP_PROXY", "nonsense://a:secret@b"), ("SSL_CERT_FILE", "/no/such/file")]
)
def test_an_environment_that_cannot_be_used_is_told_with_the_variables(variable: str, value: str, monkeypatch):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"rewards.judge.base_url: .*{variable}.* cannot be used") as raised:
        check_role("judge", EndpointSettings(base_url=ELSEWHERE, model=MODEL), Question(QUESTION, SCHEMA))
    assert "secret" not in str(raised.value)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")
def test_certificates_are_those_that_the_environment_names(tmp_path: Path, monkeypatch):
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=judge"]
        + ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    with FakeEndpoint(GOOD, tls=tls) as endpoint:
        failure = failure_of(client_of(endpoint, max_attempts=1, timeout_s=1.0))
        assert failure.kind == "connection" and "CERTIFICATE_VERIFY_FAILED" in failure.detail
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert ask(client_of(endpoint)) == [{"score": 0.5}]
