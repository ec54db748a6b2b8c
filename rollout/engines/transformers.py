"""The engine without vLLM: a batched decoding loop over a transformers model of its own.

Slower than vLLM (static batches, no prefix cache), and needs nothing but torch. Suffixes: B requests
in the batch, L tokens, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from rollout.engines.interface import Sampled, SampleRequest, Weights, weight_mark
from rollout.engines.streams import EngineStream
from rollout.settings import EngineSettings


class TransformersEngine:
    name = "transformers"
    takes_stored = False

    def __init__(
        self,
        settings: EngineSettings,
        model_folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        stop_ids: tuple[int, ...],
    ):
        self.model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype).to(device).eval()
        self.max_context_tokens = settings.max_context_tokens
        self.max_batch = settings.max_concurrent_replies
        self.device = device
        self.stream = EngineStream(device)
        self.stop_ids = frozenset(stop_ids)
        self._queue: list[tuple[int, SampleRequest]] = []

    def enter_thread(self) -> None:
        self.stream.enter()

    def add(self, key: int, request: SampleRequest) -> None:
        self._queue.append((key, request))

    def step(self) -> list[tuple[int, Sampled]]:
        """Generates one whole batch."""
        batch, self._queue = self._queue[: self.max_batch], self._queue[self.max_batch :]
        return list(zip([key for key, _ in batch], self._generate([request for _, request in batch]), strict=True))

    def abort_all(self) -> None:
        self._queue.clear()

    @torch.inference_mode()
    def _generate(self, requests: list[SampleRequest]) -> list[Sampled]:
        longest = max(len(request.prompt_ids) for request in requests)
        ids_BL = torch.zeros(len(requests), longest, dtype=torch.long)
        mask_BL = torch.zeros(len(requests), longest, dtype=torch.long)
        for row, request in enumerate(requests):  # left padding: every row's next token is in the last column
            ids_BL[row, longest - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask_BL[row, longest - len(request.prompt_ids) :] = 1
        ids_BL, mask_BL = ids_BL.to(self.device), mask_BL.to(self.device)
        positions_BL = (mask_BL.cumsum(1) - 1).clamp(min=0)

        tokens: list[list[int]] = [[] for _ in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        reasons: dict[int, str] = {}
        generators = [torch.Generator().manual_seed(request.seed) for request in requests]
        live = list(range(len(requests)))
        cache = DynamicCache(config=self.model.config)
        while live:
            logits_BV = self.model(
                input_ids=ids_BL,
                attention_mask=mask_BL,
                position_ids=positions_BL,
                past_key_values=cache,
                logits_to_keep=1,
            ).logits[:, -1]
            next_B, logprobs_B = _draw(logits_BV, [requests[i] for i in live], [generators[i] for i in live])
            keep = []
            for row, (i, token, logprob) in enumerate(zip(live, next_B.tolist(), logprobs_B.tolist(), strict=True)):
                tokens[i].append(token)
                logprobs[i].append(logprob)
                if token in self.stop_ids:
                    reasons[i] = "stop"
                elif len(tokens[i]) == requests[i].max_tokens:
                    reasons[i] = "length"
                else:
                    keep.append(row)
            if len(keep) < len(live):
                live = [live[row] for row in keep]
                keep_B = torch.tensor(keep, dtype=torch.long, device=self.device)
                cache.reorder_cache(keep_B)  # all kinds of layers know this one, recurrent ones too
                next_B, mask_BL, positions_BL = next_B[keep_B], mask_BL[keep_B], positions_BL[keep_B]
            ids_BL = next_B[:, None]
            mask_BL = torch.cat([mask_BL, mask_BL.new_ones(len(live), 1)], dim=1)
            positions_BL = positions_BL[:, -1:] + 1
        return [Sampled(tuple(t), tuple(p), reasons[i]) for i, (t, p) in enumerate(zip(tokens, logprobs, strict=True))]

    def push_weights(self, weights: Weights) -> None:
        own = self.model.state_dict()
        with torch.no_grad(), self.stream.handed_over():
            for name, tensor in weights:
                own[name].copy_(tensor)

    def fingerprint(self) -> list[tuple[tuple[str, ...], float]]:
        return [((name,), weight_mark(parameter.detach())) for name, parameter in self.model.named_parameters()]

    def sleep(self) -> None:
        """Keeps its memory: a plain model has nothing that could be rebuilt on waking."""

    def close(self) -> None:
        del self.model


def _draw(
    logits_BV: torch.Tensor, requests: list[SampleRequest], generators: list[torch.Generator]
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row from its own generator, and its log-prob (nats, tempered, float32)."""
    temperature_B = torch.tensor([request.temperature or 1.0 for request in requests], device=logits_BV.device)
    logprobs_BV = (logits_BV.float() / temperature_B[:, None]).log_softmax(-1)
    uniform_B = torch.cat([torch.rand(1, generator=generator, dtype=torch.float64) for generator in generators])
    cumulative_BV = logprobs_BV.double().exp().cumsum(-1)
    # Scaled by the row's own total, so that rounding never leaves a draw beyond the last token.
    threshold_B1 = (uniform_B.to(logits_BV.device) * cumulative_BV[:, -1])[:, None]
    sampled_B = torch.searchsorted(cumulative_BV, threshold_B1, right=True)[:, 0].clamp(max=logits_BV.shape[-1] - 1)
    greedy_B = torch.tensor([request.temperature == 0 for request in requests], device=logits_BV.device)
    token_B = torch.where(greedy_B, logprobs_BV.argmax(-1), sampled_B)
    return token_B, logprobs_BV.gather(-1, token_B[:, None])[:, 0]
