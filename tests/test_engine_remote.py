"""The policy on a server: a real vLLM server with a tiny model, and a proxy before it that provokes its faults."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from grpo.config import Config
from grpo.model.sync import push_weights
from launch.converse import choose, converse
from launch.train import read_inputs
from rollout.engines.choice import build_engine, choose_engine
from rollout.engines.interface import SampleRequest, weight_mark
from rollout.engines.policy_server import check_server
from rollout.engines.sharing import SharedEngine
from rollout.settings import EngineSettings
from tests.fake_endpoint import FakeEndpoint
from tests.small_disk import small_disk
from tests.tiny import make_model
from tests.torchrun import torchrun

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
TEMPERATURE = 0.8
PROMPT = (3, *range(5, 30), *range(5, 20))


def weights_of(model):
    """As a policy hands them out, a tied head under both of its names."""
    return iter(model.state_dict().items())


class Forgetful:
    """An engine that never receives some weights."""

    name = "forgetful"

    def __init__(self, engine, forgets):
        self._engine, self._forgets = engine, forgets

    def push_weights(self, weights):
        self._engine.push_weights((name, weight) for name, weight in weights if name not in self._forgets)

    def fingerprint(self):
        return self._engine.fingerprint()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [make_model(folder / str(seed), seed=seed) for seed in (0, 5)]


@pytest.fixture(scope="module")
def server(models, tmp_path_factory) -> str:
    """Address of a server, started as `SERVE` says. It alone takes most of this file's time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": "."}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model", models[0], "--max-model-len", "256", "--logprobs-mode", "processed_logprobs"]
    command += ["--enable-prompt-tokens-details", "--worker-extension-cls", "rollout.engines.vllm.WorkerExtension"]
    command += ["--enforce-eager", "--dtype", "float32", "--max-num-seqs", "16", "--block-size", "32"]
    command += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096"]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=os.environ | environment, stdout=output, stderr=output)
    try:
        while not _healthy(port):
            assert process.poll() is None, log.read_text()[-4000:]
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(30)


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


class Proxy:
    """Hands requests on to a server: `change` may alter (path, body), or refuse with an HTTP status."""

    def __init__(self, server: str, change: Callable[[str, dict], tuple[str, dict] | int]):
        root = server.removesuffix("/v1")

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self._hand_on(None)

            def do_POST(self):
                self._hand_on(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"null"))

            def _hand_on(self, body):
                changed = change(self.path, body)
                if isinstance(changed, int):
                    return self._answer(changed, b"{}")
                path, body = changed
                data = None if body is None else json.dumps(body).encode()
                request = urllib.request.Request(root + path, data, {"Content-Type": "application/json"})
                try:
                    with urllib.request.urlopen(request, timeout=30) as answer:
                        self._answer(answer.status, answer.read())
                except urllib.error.HTTPError as error:
                    self._answer(error.code, error.read())

            def _answer(self, status, payload):
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *_): ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> str:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self.address

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def settings_for(address: str, folder: Path, **more) -> EngineSettings:
    return EngineSettings(
        **{"kind": "remote", "base_url": address, "weights_folder": folder, "max_context_tokens": 256} | more
    )


@pytest.fixture
def engine(server, models, tmp_path):
    engine = build_engine(settings_for(server, tmp_path), models[0], torch.float32, torch.device("cpu"), stop_ids=(1,))
    yield engine
    engine.close()


def sample(engine, seeds, max_tokens=20):
    shared = SharedEngine(engine)

    async def ask():
        requests = (SampleRequest(PROMPT, max_tokens, TEMPERATURE, seed) for seed in seeds)
        return await asyncio.gather(*map(shared.sample, requests))

    replies = asyncio.run(ask())
    shared._thread.shutdown()
    return replies, shared


def largest_gap(model, replies) -> float:
    """Between the sampler's log-probs and those of plain torch, of the tempered distribution."""
    gaps = []
    for reply in replies:
        ids = torch.tensor([[*PROMPT, *reply.token_ids]])
        with torch.no_grad():
            logprobs = (model(ids).logits[0, len(PROMPT) - 1 : -1] / TEMPERATURE).log_softmax(-1)
        own = logprobs.gather(-1, torch.tensor(reply.token_ids)[:, None])[:, 0]
        gaps.append((own - torch.tensor(reply.logprobs)).abs().max().item())
    return max(gaps)


@needs_vllm
def test_the_server_samples_what_was_pushed_with_its_tempered_log_probs(engine, models, tmp_path):
    old, new = (AutoModelForCausalLM.from_pretrained(folder) for folder in models)
    push_weights(weights_of(old), engine)
    before, _ = sample(engine, range(8))
    assert largest_gap(old, before) < 1e-4 < largest_gap(new, before)
    push_weights(weights_of(new), engine)
    after, shared = sample(engine, range(8))
    assert largest_gap(new, after) < 1e-4 < largest_gap(old, after)
    assert [reply.token_ids for reply in after] == [reply.token_ids for reply in sample(engine, range(8))[0]]
    assert {reply.finish_reason for reply in after} <= {"stop", "length"}
    assert all((reply.token_ids[-1] == 1) == (reply.finish_reason == "stop") for reply in after)
    # Of the prompt's 41 tokens the first whole block of 32, for all but the first reply; none from before the push.
    assert (shared.num_prompt_tokens, shared.num_cached_tokens) == (8 * 41, 7 * 32)
    assert not [*tmp_path.iterdir()]  # pushed weights do not stay


@needs_vllm
def test_a_push_that_forgets_a_weight_is_noticed(engine, models):
    old, new = (AutoModelForCausalLM.from_pretrained(folder) for folder in models)
    push_weights(weights_of(old), engine)
    with pytest.raises(RuntimeError, match="does not hold the weights that were pushed"):
        push_weights(weights_of(new), Forgetful(engine, {"model.layers.1.mlp.down_proj.weight"}))


@needs_vllm
def test_weights_that_find_no_room_are_told_and_leave_nothing_behind(server, models, tmp_path):
    with small_disk(tmp_path / "disk", kib=100) as disk:
        settings = settings_for(server, disk)
        engine = build_engine(settings, models[0], torch.float32, torch.device("cpu"), stop_ids=(1,))
        try:
            with pytest.raises(RuntimeError, match=f"weights_folder: .* cannot be written to {disk} .*room for a copy"):
                engine.push_weights(weights_of(AutoModelForCausalLM.from_pretrained(models[1])))
            assert not [*disk.iterdir()]
        finally:
            engine.close()


@needs_vllm
def test_of_several_ranks_the_first_pushes_for_all(server, models, tmp_path):
    torchrun(2, "tests.programs.remote_program", server, *models, tmp_path)


@needs_vllm
def test_replies_that_are_aborted_hinder_no_push(engine, models):
    for key in range(64):  # more than it runs at once, so that not all can be done soon
        engine.add(key, SampleRequest(PROMPT, 200, TEMPERATURE, seed=key))
    time.sleep(0.2)  # the server is at them
    assert engine._calls and not all(call.done() for call in engine._calls.values())
    engine.abort_all()
    assert engine.step() == []
    time.sleep(0.2)  # the server learns of it from the closed connection
    push_weights(weights_of(AutoModelForCausalLM.from_pretrained(models[0])), engine)


@needs_vllm
def test_what_the_server_refuses_stops_the_run_with_its_words(engine):
    engine.add(1, SampleRequest((3,) * 300, 5, TEMPERATURE, seed=1))
    with pytest.raises(RuntimeError, match="gave no reply .*256"):
        while not engine.step():
            pass


@needs_vllm
def test_conversations_without_training_are_played_by_the_model_that_was_named(engine, server, models, tmp_path):
    push_weights(weights_of(AutoModelForCausalLM.from_pretrained(models[0])), engine)  # what the server had
    (tmp_path / "rows.jsonl").write_text('{"prompt": "hello", "goal": "bees", "reference": "bees hum ."}\n')
    values = {
        "run": {"name": "shown"},
        "model": {"path": models[1], "dtype": "float32"},
        "data": {"train": tmp_path / "rows.jsonl"},
        "engine": {"kind": "remote", "base_url": server, "weights_folder": tmp_path, "max_context_tokens": 256},
        "rollout": {"prompts_per_step": 1, "max_reply_tokens": 20, "user": {"kind": "scripted"}},
        "rewards": {"weights": {"token_amount": -1.0}, "truncated": "score"},
    }
    config = Config.model_validate(values)
    inputs = read_inputs(config)
    converse(config, inputs, *choose(config, inputs, "train", 1), None)
    named = AutoModelForCausalLM.from_pretrained(models[1]).state_dict()
    held = dict(engine.fingerprint())
    name = "model.layers.0.self_attn.o_proj.weight"
    assert held[(name,)] == pytest.approx(weight_mark(named[name]))


def faulty(change):
    return lambda path, body: change(path, body) or (path, body)


FAULTS = {
    "no development mode": (
        lambda path, body: 404 if path == "/collective_rpc" else None,
        "development mode; start it with VLLM_SERVER_DEV_MODE=1",
    ),
    "raw log-probs": (
        lambda path, body: (path, body | {"temperature": 1.0}) if path == "/v1/completions" else None,
        "not of the tempered distribution; start it with --logprobs-mode processed_logprobs",
    ),
    "no extension": (
        lambda path, body: (path, body | {"method": "unknown"}) if path == "/collective_rpc" else None,
        "start it with --worker-extension-cls rollout.engines.vllm.WorkerExtension",
    ),
    "another machine's folder": (
        lambda path, body: (path, body | {"kwargs": {"path": "/nowhere"}}) if path == "/collective_rpc" else None,
        "engine.weights_folder: the policy's server does not see",
    ),
    "another kind of answer": (
        lambda path, body: ("/reset_prefix_cache", body) if path == "/collective_rpc" else None,
        "answered a check as no vLLM server does; start it with VLLM_SERVER_DEV_MODE=1",
    ),
    "a key": (lambda path, body: 401, "set engine.api_key_env"),
}


@needs_vllm
@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_cannot_play_the_policy_is_refused_with_the_remedy(server, models, tmp_path, fault):
    change, remedy = FAULTS[fault]
    with Proxy(server, faulty(change)) as address, pytest.raises(ValueError, match=remedy):
        check_server(settings_for(address, tmp_path), models[0], "float32")


@needs_vllm
def test_a_weights_folder_that_is_none_is_told_and_not_made(server, models, tmp_path):
    for folder in (Path("README.md"), tmp_path / "gone"):
        with pytest.raises(
            ValueError, match=f"engine.weights_folder: cannot write in {folder} .*name a folder that exi"
        ):
            check_server(settings_for(server, folder), models[0], "float32")
    assert not [*tmp_path.iterdir()]


@needs_vllm
def test_a_server_that_can_is_taken_and_the_check_leaves_nothing_behind(server, models, tmp_path):
    check_server(settings_for(server, tmp_path), models[0], "float32")
    assert not [*tmp_path.iterdir()]


@needs_vllm
def test_a_server_of_another_model_type_or_context_is_refused(server, models, tmp_path):
    with pytest.raises(ValueError, match="dtype float32 instead of bfloat16"):
        check_server(settings_for(server, tmp_path), models[0], "bfloat16")
    config = json.loads((models[1] / "config.json").read_text()) | {"num_hidden_layers": 3, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="hidden_size 128 instead of 64, num_hidden_layers 2 instead of 3"):
        check_server(settings_for(server, tmp_path), tmp_path, "float32")
    with pytest.raises(ValueError, match="512 is more than the 256 tokens .* --max-model-len 512"):
        check_server(settings_for(server, tmp_path, max_context_tokens=512), models[0], "float32")


def test_a_server_that_is_not_there_is_told_with_how_to_start_one(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{probe.getsockname()[1]}/v1"
    with pytest.raises(ValueError, match="cannot be reached .*VLLM_SERVER_DEV_MODE=1 python -m vllm"):
        check_server(settings_for(address, tmp_path), tmp_path, "float32")


def test_a_server_that_is_not_vllm_is_refused(tmp_path):
    with FakeEndpoint() as endpoint, pytest.raises(ValueError, match="is not a vLLM server"):
        check_server(settings_for(endpoint.base_url, tmp_path), tmp_path, "float32")


def test_an_address_that_lacks_its_path_is_told():
    with FakeEndpoint() as endpoint, pytest.raises(ValueError, match="HTTP 404; correct the address, .* ends in /v1"):
        check_server(settings_for(endpoint.base_url.removesuffix("/v1"), Path(".")), Path("."), "float32")


def test_a_key_that_is_not_set_is_told(tmp_path, monkeypatch):
    monkeypatch.delenv("POLICY_KEY", raising=False)
    with pytest.raises(ValueError, match="engine.api_key_env"):
        check_server(settings_for("http://127.0.0.1:9/v1", tmp_path, api_key_env="POLICY_KEY"), tmp_path, "float32")


def test_a_password_in_the_address_is_shown_nowhere(tmp_path):
    with FakeEndpoint() as endpoint:
        address = endpoint.base_url.replace("http://", "http://me:hunter2@")
        settings = settings_for(address, tmp_path)
        with pytest.raises(ValueError, match=r"\*\*\*@127.0.0.1.* is not a vLLM server") as told:
            check_server(settings, tmp_path, "float32")
    assert "hunter2" not in f"{told.value}{settings!r}{settings.model_dump_json()}{choose_engine(settings)}"
    assert settings.base_url == address


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"kind": "remote"}, "needs engine.base_url and engine.weights_folder"),
        ({"kind": "remote", "base_url": "server:8000", "weights_folder": "w"}, "is no address"),
        ({"base_url": "http://127.0.0.1:8000/v1"}, "base_url is read with kind: remote only"),
        (
            {"kind": "remote", "base_url": "http://me:pw@h/v1", "weights_folder": "w", "api_key_env": "KEY"},
            "cannot both be sent",
        ),
    ],
)
def test_settings_of_a_server_come_together_and_with_its_kind(given, problem):
    with pytest.raises(ValidationError, match=problem):
        EngineSettings(**given)
