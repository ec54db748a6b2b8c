"""Asking a role whose server is a fake one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout.roles.client import LLMClient, LLMError
from rollout.settings import EndpointSettings
from tests.fake_endpoint import MODEL, FakeEndpoint, says

SCHEMA = {
    "type": "object",
    "properties": {"score": {"type": "number", "minimum": 0, "maximum": 1}},
    "required": ["score"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "How good is it?"}]
GOOD = says({"score": 0.5})


def client_of(endpoint: FakeEndpoint, role: str = "judge", **settings: Any) -> LLMClient:
    settings = {"base_url": endpoint.base_url, "model": MODEL, "timeout_s": 5.0, **settings}
    return LLMClient(role, EndpointSettings(**settings), backoff_s=0.001)


def ask(client: LLMClient, times: int = 1, **more: Any) -> list[dict[str, Any]]:
    async def all_at_once() -> list[dict[str, Any]]:
        try:
            return await asyncio.gather(*(client.ask(QUESTION, SCHEMA, **more) for _ in range(times)))
        finally:
            await client.close()

    return asyncio.run(all_at_once())


def failure_of(client: LLMClient, **more: Any) -> LLMError:
    with pytest.raises(LLMError) as raised:
        ask(client, **more)
    return raised.value
