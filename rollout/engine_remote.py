"""A policy that a vLLM server generates with: token ids and log-probs over HTTP, weights through a folder.

The server has devices of its own, serves nobody else, and is started with `SERVE`. It must import this project (its
worker tells which weights it computes with) and see `engine.weights_folder`. A push writes the weights there, has the
server load them and empty its prefix cache, and takes the files away again.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

import openai
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoConfig

from rollout.engine import Sampled, SampleRequest, Weights
from rollout.settings import EngineSettings

SERVE = (
    "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL_FOLDER "
    "--logprobs-mode processed_logprobs --enable-prompt-tokens-details "
    "--worker-extension-cls rollout.engine_vllm.WorkerExtension"
)
"""Starts a server for a policy, from the root of this project or where it is installed."""

CHECK_TIMEOUT_S, ADMIN_TIMEOUT_S, REPLY_TIMEOUT_S = 30.0, 1800.0, 3600.0
LOOK_AGAIN_S = 0.02
"""How long `step` waits at most, so that requests which came meanwhile are sent."""
SHARD_BYTES = 2**30
WHOLE_DISTRIBUTION = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Said in every request, since a server else takes what the model's generation config says."""
SAME_MODEL = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


class RemoteEngine:
    """Ranks may share a server; the first of them writes and pushes what all of them gather."""

    name = "remote"

    def __init__(
        self,
        settings: EngineSettings,
        model_folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        stop_ids: tuple[int, ...],
    ):
        self.max_context_tokens = settings.max_context_tokens
        self.stop_ids = list(stop_ids)
        self._weights_folder = settings.weights_folder
        self._server = PolicyServer(settings)
        self._model = self._server.model()
        self._replies = openai.AsyncOpenAI(base_url=settings.base_url, api_key=read_key(settings), max_retries=2)
        self._slots = asyncio.Semaphore(settings.max_concurrent_replies)
        self._calls: dict[int, Future[Sampled]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="remote engine", daemon=True)
        self._thread.start()

    def enter_thread(self) -> None:
        """Any thread may step it: the calls are made in one of its own."""

    def add(self, key: int, request: SampleRequest) -> None:
        self._calls[key] = asyncio.run_coroutine_threadsafe(self._reply(request), self._loop)

    def step(self) -> list[tuple[int, Sampled]]:
        """Waits for a reply, or for a moment."""
        wait(self._calls.values(), timeout=LOOK_AGAIN_S, return_when=FIRST_COMPLETED)
        done = [key for key, call in self._calls.items() if call.done()]
        return [(key, self._calls.pop(key).result()) for key in done]

    def abort_all(self) -> None:
        for call in self._calls.values():
            call.cancel()  # which closes the connection, and that ends the reply on the server
        self._calls.clear()

    async def _reply(self, request: SampleRequest) -> Sampled:
        body = {
            "model": self._model,
            "prompt": list(request.prompt_ids),
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "stop_token_ids": self.stop_ids,
            "logprobs": 0,  # of the sampled token alone
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # their text is not needed
            **WHOLE_DISTRIBUTION,
        }
        try:
            async with self._slots:
                answer = await self._replies.post(
                    "/completions", cast_to=object, body=body, options={"timeout": REPLY_TIMEOUT_S}
                )
        except openai.APIError as error:
            raise RuntimeError(f"{self._server.where} gave no reply ({_reason(error)}); see the server's log") from None
        return _sampled(answer)

    def push_weights(self, weights: Weights) -> None:
        """Collective where there are several ranks. Raises RuntimeError where the server does not take them."""
        if dist.is_initialized() and dist.get_rank():
            for _ in weights:
                pass
        else:
            self._push(weights)
        if dist.is_initialized():
            dist.barrier()  # nobody samples before the server has them

    def _push(self, weights: Weights) -> None:
        folder = self._weights_folder / f"policy-{uuid.uuid4().hex}"
        folder.mkdir(parents=True)
        try:
            for number, shard in enumerate(_shards(weights)):
                save_file(shard, folder / f"model-{number:05}.safetensors", metadata={"format": "pt"})
            self._server.call_workers("reload_weights", weights_path=str(folder.resolve()))
            if self._server.post("/reset_prefix_cache") != {"success": True}:
                raise RuntimeError(
                    f"{self._server.where} kept its prefix cache after a weight update: it still generates, "
                    "perhaps for somebody else; give the trainer a server of its own"
                )
        except openai.APIError as error:
            raise RuntimeError(
                f"{self._server.where} did not load the weights from {folder} ({_reason(error)}); see the server's log"
            ) from None
        finally:
            shutil.rmtree(folder)

    def fingerprint(self) -> list[tuple[tuple[str, ...], float]]:
        (marks,) = self._server.call_workers("weight_marks")
        return [(tuple(names), mark) for names, mark in marks]

    def sleep(self) -> None:
        """The server's memory is not the trainer's."""

    def close(self) -> None:
        self.abort_all()
        asyncio.run_coroutine_threadsafe(self._replies.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._server.close()


class PolicyServer:
    """The calls that are not replies, each of which waits for its answer. Raises openai.APIError."""

    def __init__(self, settings: EngineSettings):
        self.where = f"engine.base_url: the policy's server at {settings.base_url}"
        self._root = settings.base_url.rstrip("/").removesuffix("/v1")
        self._client = openai.OpenAI(base_url=settings.base_url, api_key=read_key(settings), max_retries=0)

    def model(self) -> str:
        """What the server calls its model."""
        return self.models()[0]["id"]

    def models(self) -> list[dict[str, Any]]:
        return self._client.get("/models", cast_to=object, options={"timeout": CHECK_TIMEOUT_S})["data"]

    def post(self, path: str, body: Any = None) -> Any:
        return self._client.post(self._root + path, cast_to=object, body=body, options={"timeout": ADMIN_TIMEOUT_S})

    def call_workers(self, method: str, **arguments: str) -> list[Any]:
        """What each of the server's workers answers."""
        return self.post("/collective_rpc", {"method": method, "kwargs": arguments})["results"]

    def top_logprobs(self, model: str, temperature: float) -> dict[str, float]:
        """Log-probs, in nats, of the likeliest tokens after a fixed token."""
        body = {"model": model, "prompt": [0], "max_tokens": 1, "temperature": temperature, "seed": 0, "logprobs": 5}
        body |= {"return_tokens_as_token_ids": True, **WHOLE_DISTRIBUTION}
        answer = self._client.post("/completions", cast_to=object, body=body, options={"timeout": CHECK_TIMEOUT_S})
        return answer["choices"][0]["logprobs"]["top_logprobs"][0]

    def close(self) -> None:
        self._client.close()


def check_server(settings: EngineSettings, model_folder: Path, dtype: str) -> None:
    """Asks the server whether it can play the policy. Raises ValueError, with the remedy, where it cannot."""
    server = PolicyServer(settings)
    try:
        model = _served_model(server, settings)
        _check_workers(server, settings, model_folder, dtype)
        _check_logprobs(server, model)
    except openai.APIError as error:
        raise ValueError(f"{server.where} refused a check ({_reason(error)}); see the server's log") from None
    finally:
        server.close()


def _served_model(server: PolicyServer, settings: EngineSettings) -> str:
    remedy = f"start it ({SERVE}) or correct the address"
    try:
        served = server.models()[0]
        name, max_tokens = served["id"], served["max_model_len"]
    except openai.APIStatusError as error:
        if error.status_code in (401, 403):
            remedy = "set engine.api_key_env to the environment variable that holds a valid key"
        raise ValueError(f"{server.where} answered HTTP {error.status_code}; {remedy}") from None
    except openai.APIConnectionError as error:
        raise ValueError(f"{server.where} cannot be reached ({_reason(error)}); {remedy}") from None
    except (openai.OpenAIError, ValueError, LookupError, TypeError):
        raise ValueError(f"{server.where} is not a vLLM server; {remedy}") from None
    if max_tokens < settings.max_context_tokens:
        raise ValueError(
            f"engine.max_context_tokens: {settings.max_context_tokens} is more than the {max_tokens} tokens of the "
            f"policy's server; lower it, or start the server with --max-model-len {settings.max_context_tokens}"
        )
    return name


def _check_workers(server: PolicyServer, settings: EngineSettings, model_folder: Path, dtype: str) -> None:
    probe = settings.weights_folder / f"probe-{uuid.uuid4().hex}"
    try:
        settings.weights_folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        answers = server.call_workers("served", path=str(probe.resolve()))
    except OSError as error:
        raise ValueError(f"engine.weights_folder: cannot write in {settings.weights_folder} ({error})") from None
    except openai.NotFoundError:
        raise ValueError(
            f"{server.where} takes no weights: it does not run in vLLM's development mode; start it with {SERVE}"
        ) from None
    except openai.InternalServerError:
        raise ValueError(
            f"{server.where} cannot tell which weights it computes with; start it with --worker-extension-cls "
            "rollout.engine_vllm.WorkerExtension, where this project can be imported"
        ) from None
    finally:
        probe.unlink(missing_ok=True)
    if len(answers) > 1:
        raise ValueError(
            f"{server.where} splits the model over {len(answers)} GPUs, so no weight can be compared; start it with "
            "--tensor-parallel-size 1"
        )
    (served,) = answers
    if not served["sees_path"]:
        raise ValueError(
            f"engine.weights_folder: the policy's server does not see {settings.weights_folder.resolve()}; name a "
            "folder that both machines mount under the same path"
        )
    wanted = AutoConfig.from_pretrained(model_folder).to_dict()
    wanted = {name: wanted[name] for name in SAME_MODEL if name in wanted} | {"dtype": dtype}
    other = {name: served["config"].get(name) for name in wanted if served["config"].get(name) != wanted[name]}
    if other:
        differences = ", ".join(f"{name} {value} instead of {wanted[name]}" for name, value in other.items())
        raise ValueError(
            f"{server.where} serves another model than model.path ({differences}); start it with --model "
            f"{model_folder} --dtype {dtype}"
        )


def _check_logprobs(server: PolicyServer, model: str) -> None:
    """At temperature 2 log-probs lie half as far apart as at 1, and they are of a distribution."""
    at_1, at_2 = server.top_logprobs(model, 1.0), server.top_logprobs(model, 2.0)
    both = sorted(at_1.keys() & at_2.keys(), key=at_1.get)
    gap_1, gap_2 = at_1[both[-1]] - at_1[both[0]], at_2[both[-1]] - at_2[both[0]]
    tempered = abs(gap_2 - gap_1 / 2) <= abs(gap_2 - gap_1)
    if not tempered or sum(map(math.exp, at_2.values())) > 1.01:
        raise ValueError(
            f"{server.where} gives log-probs that are not of the tempered distribution; start it with "
            "--logprobs-mode processed_logprobs"
        )


def read_key(settings: EngineSettings) -> str:
    """Raises ValueError where the key's variable is not set."""
    if settings.api_key_env is None:
        return "none"  # not None: the package would send OPENAI_API_KEY, to whatever server this is
    key = os.environ.get(settings.api_key_env, "").strip()
    if not key:
        raise ValueError(
            "engine.api_key_env: names no environment variable that is set; export the key in one, or set it to null"
        )
    return key


def _shards(weights: Weights) -> Iterator[dict[str, torch.Tensor]]:
    """Copies of about a gibibyte each, so that no more is held at once: gathered weights are gone after their turn."""
    shard: dict[str, torch.Tensor] = {}
    num_bytes = 0
    for name, tensor in weights:
        shard[name] = tensor.to("cpu", copy=True).contiguous()
        num_bytes += tensor.nbytes
        if num_bytes >= SHARD_BYTES:
            yield shard
            shard, num_bytes = {}, 0
    if shard:
        yield shard


def _sampled(answer: Any) -> Sampled:
    choice, usage = answer["choices"][0], answer["usage"]
    logprobs = choice["logprobs"]["token_logprobs"]
    if choice["finish_reason"] not in ("stop", "length") or len(logprobs) != len(choice["token_ids"]):
        raise RuntimeError(f"the policy's server ended a reply with {choice['finish_reason']}; see its log")
    details = usage.get("prompt_tokens_details") or {}
    return Sampled(
        tuple(choice["token_ids"]), tuple(logprobs), choice["finish_reason"], details.get("cached_tokens", 0)
    )


def _reason(error: openai.APIError) -> str:
    return str(error.__cause__ or error.message)[:300]
