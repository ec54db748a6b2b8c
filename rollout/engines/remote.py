"""A policy that a vLLM server generates with: token ids and log-probs over HTTP, weights through a folder.

The server has devices of its own, serves nobody else, and is started as `rollout.engines.policy_server` says. It must import
this project (its worker tells which weights it computes with) and see `engine.weights_folder`. A push writes the
weights there, has the server load them and empty its prefix cache, and takes the files away again.
"""

from __future__ import annotations

import asyncio
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

from rollout.engines.interface import Sampled, SampleRequest, Weights
from rollout.engines.policy_server import WHOLE_DISTRIBUTION, PolicyServer
from rollout.files import is_disk_fault, share_as_folder
from rollout.settings import EngineSettings

REPLY_TIMEOUT_S = 3600.0
LOOK_AGAIN_S = 0.02
"""How long `step` waits at most, so that requests which came meanwhile are sent."""
SHARD_BYTES = 2**30


class RemoteEngine:
    """Ranks may share a server; the first of them writes and pushes what all of them gather."""

    name = "remote"
    takes_stored = True

    def __init__(self, settings: EngineSettings, stop_ids: tuple[int, ...]):
        """The server has the model, and devices of its own."""
        self.max_context_tokens = settings.max_context_tokens
        self.stop_ids = list(stop_ids)
        self._weights_folder = settings.weights_folder
        self._server = PolicyServer(settings)
        self._model = self._server.model()
        http_client = openai.DefaultAsyncHttpxClient(**self._server.route)
        self._replies = openai.AsyncOpenAI(**self._server.connection | {"max_retries": 2}, http_client=http_client)
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
            "ignore_eos": True,  # the server's own, which it reads from its model's folder
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
            raise RuntimeError(
                f"{self._server.where} gave no reply ({self._server.reason_of(error)}); see its log"
            ) from None
        try:
            return _sampled(answer)
        except (LookupError, TypeError):
            raise RuntimeError(f"{self._server.where} gave something else than a reply; see its log") from None

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
        try:
            _write(weights, folder)
            self._server.call_workers("reload_weights", weights_path=str(folder.resolve()))
            if self._server.post("/reset_prefix_cache") != {"success": True}:
                raise RuntimeError(
                    f"{self._server.where} kept its prefix cache after a weight update: it still generates, "
                    "perhaps for somebody else; give the trainer a server of its own"
                )
        except openai.APIError as error:
            reason = self._server.reason_of(error)
            raise RuntimeError(
                f"{self._server.where} did not load the weights from {folder} ({reason}); see its log"
            ) from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # it may never have been made

    def fingerprint(self) -> list[tuple[tuple[str, ...], float | None]]:
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


def _write(weights: Weights, folder: Path) -> None:
    try:
        folder.mkdir()
        for number, shard in enumerate(_shards(weights)):
            save_file(shard, folder / f"model-{number:05}.safetensors", metadata={"format": "pt"})
        share_as_folder(folder)  # the server may be another user's
    except Exception as error:
        if not is_disk_fault(error):
            raise
        raise RuntimeError(
            f"engine.weights_folder: the weights cannot be written to {folder.parent} ({error}); it must have room for "
            "a copy of the model"
        ) from error


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
