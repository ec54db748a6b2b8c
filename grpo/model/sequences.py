"""Sampled replies become training sequences: every token as it was sampled, and nothing else trained.

A conversation whose prompts each begin with all that came before is one sequence: its replies are trained, what the
user said between them is context. Where the chat template rendered the past differently (`Chat.next_prompt_ids`), a
new sequence begins, with that prompt. All sequences of a sample carry one number, so that a loss sees one sample:

    exact        p p p | a a . u u u b b b        p prompt, a b replies, u the user's message within its template
    rewritten    p p p | a a
                 p p p | a'a' . u u u b b b       a' the first reply as the template now renders it: context
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix

from grpo.groups import Group
from grpo.model.packing import TrainSequence
from rollout.settings import TrainOn
from rollout.types import Reply


@dataclass(frozen=True, slots=True)
class Sample:
    """What one sample of a group trains on."""

    position: int
    """In its group."""
    replies: tuple[Reply, ...]
    advantage: float

    @property
    def num_tokens(self) -> int:
        return sum(len(reply.token_ids) - reply.num_untrained for reply in self.replies)


def valid_samples(group: Group, train_on: TrainOn, advantages_G: Sequence[float] | None = None) -> list[Sample]:
    """The valid samples of a group, with advantages of 0 where none are given."""
    replies_G = group.trained_G(train_on)
    advantages_G = advantages_G or [0.0] * len(replies_G)
    return [
        Sample(position, replies, advantage)
        for position, (replies, reward, advantage) in enumerate(
            zip(replies_G, group.rewards_G, advantages_G, strict=True)
        )
        if reward.valid
    ]


def train_sequences(samples_P: Sequence[Sequence[Sample]], weights_S: Sequence[float]) -> list[TrainSequence]:
    """The sequences of all samples, which are numbered through and weighted by `weights_S`; each reply lies in exactly
    one. Those of a group share as much of their prompts as they can.
    """
    numbered = iter(enumerate(weights_S))
    sequences = []
    for samples in samples_P:
        siblings = [
            _sequence(chain, number, sample.advantage, weight)
            for sample, (number, weight) in zip(samples, numbered, strict=False)  # takes one for each sample
            for chain in _chains(sample.replies)
            if any(len(reply.token_ids) > reply.num_untrained for reply in chain)  # else it is all an untrained thought
        ]
        sequences += _with_shared_prompt(siblings)
    return sequences


def _with_shared_prompt(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """The sequences of one group, with the part that all of their prompts begin with as the prompt of each.

    So they may share a row. What a prompt has beyond it becomes context of the response.
    """
    prompt = tuple(commonprefix([sequence.prompt_ids for sequence in sequences]))
    if not prompt:
        return list(sequences)
    shared = []
    for sequence in sequences:
        rest = sequence.prompt_ids[len(prompt) :]
        context = {*range(len(rest)), *(len(rest) + index for index in sequence.context)}
        response_ids = rest + sequence.response_ids
        shared.append(replace(sequence, prompt_ids=prompt, response_ids=response_ids, context=frozenset(context)))
    return shared


def _chains(replies: Sequence[Reply]) -> list[list[Reply]]:
    """Runs of replies each of whose prompts begins with the ids of the reply before and of its prompt."""
    chains: list[list[Reply]] = []
    for reply in replies:
        if chains and reply.prompt_ids[: len(chains[-1][-1].ids)] == chains[-1][-1].ids:
            chains[-1].append(reply)
        else:
            chains.append([reply])
    return chains


def _sequence(chain: Sequence[Reply], number: int, advantage: float, weight: float) -> TrainSequence:
    prompt_ids, ids = chain[0].prompt_ids, chain[-1].ids
    start = len(prompt_ids)
    trained = {
        index for reply in chain for index in range(len(reply.prompt_ids) + reply.num_untrained, len(reply.ids))
    }
    context = frozenset(index - start for index in range(start, len(ids)) if index not in trained)
    logprobs = tuple(logprob for reply in chain for logprob in reply.logprobs[reply.num_untrained :])
    return TrainSequence(prompt_ids, ids[start:], logprobs, number, advantage, weight, context)
