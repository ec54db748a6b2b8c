"""Training sequences become flat tensors: the prompt of a group is computed once.

A row holds one prompt and several of its replies, one after another. Position ids restart after the
prompt and the attention mask keeps the replies apart, so each reply sees exactly what it would see
alone:

    ids        p0 p1 p2 | a0 a1 a2 | b0 b1 | ·
    position    0  1  2 |  3  4  5 |  3  4 | 0
    segment     0  0  0 |  1  1  1 |  2  2 | -1     a token sees segment 0 and its own, never later ones
    predicts   .. .. a0/b0  a1 a2  ·   b1  ·        the last prompt token predicts every first reply token

A padded batch is the special case of one reply per row. Response tokens that are not trained (a user's message
between two replies) are attended to and nothing else. Suffixes: R rows, L tokens in a row, N trained response tokens
(flat, sequence after sequence).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch

PROMPT, PADDING = 0, -1


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """Replies to train on, as they were sampled: one, or all of a conversation (`grpo.sequences`)."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    """Of each trained token."""
    number: int
    """Of the sample it belongs to, from 0: tells it from the others of its mini-batch."""
    advantage: float
    weight: float
    """Of each of its tokens in the step's loss (`grpo.loss.aggregation_weights`)."""
    context: frozenset[int] = frozenset()
    """Indices of the response tokens that are only attended to, never trained."""

    @property
    def trained(self) -> list[int]:
        """Indices of the response tokens that are trained on."""
        return [index for index in range(len(self.response_ids)) if index not in self.context]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One micro-batch."""

    input_ids_RL: torch.Tensor
    position_ids_RL: torch.Tensor
    segment_RL: torch.Tensor
    predictor_N: torch.Tensor
    """Flat index (row · L + column) of the token whose hidden state predicts trained token n."""
    target_N: torch.Tensor
    """The trained token ids."""
    sequence_N: torch.Tensor
    """`TrainSequence.number` of token n."""
    sampler_logprobs_N: torch.Tensor
    advantages_N: torch.Tensor
    weights_N: torch.Tensor

    def to(self, device: torch.device) -> PackedBatch:
        return PackedBatch(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    def attention_mask(self) -> torch.Tensor:
        """[R, 1, L, L] bool, True where a query (third axis) may look at a key (last axis)."""
        rows, length = self.segment_RL.shape
        row_R, column_L = (torch.arange(number, device=self.segment_RL.device) for number in (rows, length))
        return visibility(self.segment_RL)(row_R[:, None, None, None], None, column_L[:, None], column_L)


def visibility(segment_RL: torch.Tensor) -> Callable[..., torch.Tensor]:
    """may_look(row, head, query, key), of indices that broadcast: True where the query may look at the key.

    Padding attends to itself (its segment equals its own), so no row of the softmax is empty.
    """

    def may_look(row, _, query, key):
        segment = segment_RL[row, key]
        return (query >= key) & ((segment == PROMPT) | (segment == segment_RL[row, query]))

    return may_look


@dataclass(frozen=True, slots=True)
class _Row:
    prompt_ids: tuple[int, ...]
    sequences: tuple[TrainSequence, ...]

    def __len__(self) -> int:
        return len(self.prompt_ids) + sum(len(sequence.response_ids) for sequence in self.sequences)


def plan_micro_batches(
    sequences: Sequence[TrainSequence],
    *,
    max_tokens: int,
    share_prompt: bool = True,
    whole_samples: bool = False,
    pair_cost: float = 0.0,
    multiple: int = 1,
) -> list[list[_Row]]:
    """Rows, then micro-batches of rows: neither longer than `max_tokens`, padding to `multiple` counted (but
    a row that fits only before that padding stands alone).

    With `share_prompt`, sequences with the same prompt share rows: as few rows as is cheapest, where a row of L
    tokens costs L + `pair_cost` · L². Every sequence lands in exactly one row; with `whole_samples`, those of one
    sample (`number`) in one micro-batch. Raises ValueError for an empty response, and for a sequence longer than the
    budget, or a sample that must stay whole.
    """
    units: dict[int, list[TrainSequence]] = {}
    for index, sequence in enumerate(sequences):
        if not sequence.response_ids:
            raise ValueError("a reply without tokens cannot be trained on")
        units.setdefault(sequence.number if whole_samples else index, []).append(sequence)
    groups: dict[tuple[int, ...], list[_Row]] = {}
    blocks: list[list[_Row]] = []  # of rows that stay together
    for unit in units.values():
        one_row = share_prompt and len({sequence.prompt_ids for sequence in unit}) == 1
        rows = [_Row(part[0].prompt_ids, tuple(part)) for part in ([unit] if one_row else [[one] for one in unit])]
        num_tokens = len(rows) * max(map(len, rows))
        if num_tokens > max_tokens:
            what = "one sequence" if len(unit) == 1 else "the sequences of one sample"
            raise ValueError(
                f"update.max_tokens_per_micro_batch: {max_tokens} is less than {what} of {num_tokens} tokens; raise it"
            )
        if one_row:
            groups.setdefault(rows[0].prompt_ids, []).extend(rows)
        else:
            blocks.append(rows)
    blocks += [[row] for siblings in groups.values() for row in _cheapest_rows(siblings, max_tokens, pair_cost)]
    micro_batches: list[list[_Row]] = []
    # Ascending lengths: the newest block holds the longest row, so it sets the padded size.
    for block in sorted(blocks, key=lambda block: max(map(len, block))):
        num_rows = len(micro_batches[-1]) + len(block) if micro_batches else 0
        if micro_batches and num_rows * padded_length(block, multiple) <= max_tokens:
            micro_batches[-1] += block
        else:
            micro_batches.append([*block])
    return micro_batches


def _cheapest_rows(siblings: Sequence[_Row], max_tokens: int, pair_cost: float) -> list[_Row]:
    """The siblings in 1, 2, 3 … rows of about equal length, whichever number costs least and fits."""

    def cost(rows: list[_Row]) -> float:
        return sum(len(row) + pair_cost * len(row) ** 2 for row in rows)

    candidates = (_even_rows(siblings, number) for number in range(1, len(siblings) + 1))
    return min((rows for rows in candidates if max(map(len, rows)) <= max_tokens), key=cost)


def _even_rows(siblings: Sequence[_Row], number: int) -> list[_Row]:
    """Longest first, each to the row that is shortest so far."""
    rows = [_Row(siblings[0].prompt_ids, ()) for _ in range(number)]
    for sibling in sorted(siblings, key=lambda sibling: -len(sibling)):
        shortest = min(range(number), key=lambda index: len(rows[index]))
        rows[shortest] = _Row(sibling.prompt_ids, rows[shortest].sequences + sibling.sequences)
    return rows


def padded_length(rows: Sequence[_Row], multiple: int) -> int:
    """The longest row, rounded up to a multiple of `multiple` tokens."""
    return -(-max(map(len, rows)) // multiple) * multiple


def pack(rows: Sequence[_Row], multiple: int = 1) -> PackedBatch:
    """The tensors of one micro-batch of `plan_micro_batches`."""
    length = padded_length(rows, multiple)
    shape = (len(rows), length)
    input_ids_RL, position_ids_RL = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    segment_RL = torch.full(shape, PADDING)
    predictors: list[int] = []
    targets: list[int] = []
    lengths: list[int] = []
    for r, row in enumerate(rows):
        start = len(row.prompt_ids)
        input_ids_RL[r, :start] = torch.tensor(row.prompt_ids)
        position_ids_RL[r, :start] = torch.arange(start)
        segment_RL[r, :start] = PROMPT
        column = start
        for segment, sequence in enumerate(row.sequences, 1):
            num = len(sequence.response_ids)
            input_ids_RL[r, column : column + num] = torch.tensor(sequence.response_ids)
            position_ids_RL[r, column : column + num] = torch.arange(start, start + num)
            segment_RL[r, column : column + num] = segment
            before = [r * length + start - 1, *range(r * length + column, r * length + column + num - 1)]
            trained = sequence.trained
            predictors += [before[index] for index in trained]
            targets += [sequence.response_ids[index] for index in trained]
            lengths.append(len(trained))
            column += num
    flat = [sequence for row in rows for sequence in row.sequences]
    lengths_S = torch.tensor(lengths)
    return PackedBatch(
        input_ids_RL=input_ids_RL,
        position_ids_RL=position_ids_RL,
        segment_RL=segment_RL,
        predictor_N=torch.tensor(predictors),
        target_N=torch.tensor(targets),
        sequence_N=torch.tensor([sequence.number for sequence in flat]).repeat_interleave(lengths_S),
        sampler_logprobs_N=torch.tensor([logprob for sequence in flat for logprob in sequence.sampler_logprobs]),
        advantages_N=torch.tensor([sequence.advantage for sequence in flat]).repeat_interleave(lengths_S),
        weights_N=torch.tensor([sequence.weight for sequence in flat]).repeat_interleave(lengths_S),
    )


def idle_batch(multiple: int = 1) -> PackedBatch:
    """What a rank without work runs, so that it joins every collective call of the others: weight 0."""
    nothing = TrainSequence((0,), (0,), (0.0,), number=0, advantage=0.0, weight=0.0)
    return pack([_Row(nothing.prompt_ids, (nothing,))], multiple)
