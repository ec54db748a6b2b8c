"""Pushes a model's weights into the engine, and proves that they arrived."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from rollout.engines.interface import Engine, Weights, weight_mark


def push_weights(weights: Weights, engine: Engine) -> dict[str, float]:
    """Streams every weight to this rank's engine and compares fingerprints; returns the mark of each weight by its name
    (`rollout.engines.interface.weight_mark`). Collective where `weights` is.

    Raises RuntimeError naming the first weights that differ: the engine would sample another policy.
    """
    sent: dict[str, float] = {}

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in weights:
            sent[name] = weight_mark(weight)
            yield name, weight

    engine.push_weights(stream())
    fingerprint = engine.fingerprint()
    covered = {name for names, _ in fingerprint for name in names}
    known = len(covered & sent.keys())
    if known < len(sent) / 2:  # some may have names of the engine's own, but most must be known
        raise RuntimeError(
            f"the {engine.name} engine knows {known} of the {len(sent)} weights that were pushed by their names, such "
            f"as {next(iter(sent))}, so the weights it samples from cannot be checked; try engine.kind=transformers"
        )
    stale = [
        names
        for names, held in fingerprint
        if held is not None
        and all(name in sent for name in names)
        and not math.isclose(held, sum(sent[name] for name in names), rel_tol=1e-9, abs_tol=1e-9)
    ]
    if stale:
        raise RuntimeError(
            f"the {engine.name} engine does not hold the weights that were pushed: {len(stale)} differ, "
            f"the first is {' + '.join(stale[0])}; it would sample an old policy. Try engine.kind=transformers"
        )
    return sent


def max_gap(dtype: torch.dtype, device: torch.device) -> float:
    """Largest mean |log-prob difference| of sampler and trainer, nats, where `update.max_logp_gap` is null.

    More than rounding makes: engine and trainer multiply in another order. Between 16 and 32, where the logits of
    likely tokens lie, bfloat16 has a number every 1/8, so each logit is 1/32 off on average; float32 is off by 1e-6,
    and by 1e-3 where kernels multiply it as TF32, of 11 bits. What an engine with other weights samples differs by
    tenths.
    """
    if dtype != torch.float32:
        return 0.05
    return 0.01 if device.type == "cuda" else 1e-3


class EngineDrift(RuntimeError):
    """The engine samples another policy than the one being trained."""


def check_gap(gap_mean: float, limit: float) -> None:
    """Stops a run whose sampler and trainer disagree. Raises EngineDrift above `limit` nats."""
    if not gap_mean <= limit:  # so that NaN stops the run too
        raise EngineDrift(
            f"the engine's log-probs are {gap_mean:.3g} nats from the trainer's on average (update.max_logp_gap: {limit}): "
            "it samples another policy than the one being trained. Check that the engine runs the model in "
            "model.dtype, or try engine.kind=transformers"
        )
