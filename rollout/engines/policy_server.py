"""The vLLM server of a remote policy: how it is started, what it is told besides requests, what must be true of it."""

from __future__ import annotations

import json
import math
import uuid
from pathlib import Path
from typing import Any

import openai
from transformers import AutoConfig

from rollout.roles.endpoints import Address, presentable, read_key
from rollout.settings import EngineSettings, looked_at

SERVE = (
    "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL_FOLDER "
    "--logprobs-mode processed_logprobs --enable-prompt-tokens-details "
    "--worker-extension-cls rollout.engines.vllm.WorkerExtension"
)
"""Starts a server for a policy, from the root of this project or where it is installed."""

CHECK_TIMEOUT_S, ADMIN_TIMEOUT_S = 30.0, 1800.0
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


class PolicyServer:
    """The calls that are not replies, each of which waits for its answer. Raises openai.APIError."""

    def __init__(self, settings: EngineSettings):
        address = Address(settings.base_url, read_key("engine", settings.api_key_env))
        self.where = f"engine.base_url: the policy's server at {address.shown}"
        self.connection, self.route = address.connection, address.route
        self._present = presentable(address.secrets)
        self._root = self.connection["base_url"].rstrip("/").removesuffix("/v1")
        self._client = openai.OpenAI(**self.connection, http_client=openai.DefaultHttpxClient(**self.route))

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

    def reason_of(self, error: openai.APIError) -> str:
        return self._present(str(error.__cause__ or error.message))

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
        raise ValueError(f"{server.where} refused a check ({server.reason_of(error)}); see the server's log") from None
    except (json.JSONDecodeError, LookupError, TypeError, AttributeError):
        raise ValueError(f"{server.where} answered a check as no vLLM server does; start it with {SERVE}") from None
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
        elif error.status_code == 404:
            remedy = "correct the address, which usually ends in /v1"
        raise ValueError(f"{server.where} answered HTTP {error.status_code}; {remedy}") from None
    except openai.APIConnectionError as error:
        raise ValueError(f"{server.where} cannot be reached ({server.reason_of(error)}); {remedy}") from None
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
        probe.touch()
    except OSError as error:
        raise ValueError(
            f"engine.weights_folder: cannot write in {settings.weights_folder} ({error.strerror})"
            f"{looked_at(settings.weights_folder)}; name a folder that exists, and that both "
            "machines mount under the same path"
        ) from None
    try:
        answers = server.call_workers("served", path=str(probe.resolve()))
    except openai.NotFoundError:
        raise ValueError(
            f"{server.where} takes no weights: it does not run in vLLM's development mode; start it with {SERVE}"
        ) from None
    except openai.InternalServerError:
        raise ValueError(
            f"{server.where} cannot tell which weights it computes with; start it with --worker-extension-cls "
            "rollout.engines.vllm.WorkerExtension, where this project can be imported"
        ) from None
    finally:
        probe.unlink(missing_ok=True)
    if len(answers) > 1:
        raise ValueError(
            f"{server.where} splits the model over {len(answers)} GPUs, so no weight can be compared; start it with "
            "--tensor-parallel-size 1"
        )
    served = answers[0]
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
