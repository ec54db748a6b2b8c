"""Training sequences become flat tensors: the prompt of a group is computed once.

A row holds prompts, each with several of its replies after it. Position ids restart after a prompt and the attention
mask keeps the replies apart, so each reply sees exactly what it would see alone:

    ids        p0 p1 p2 | a0 a1 a2 | b0 b1 | q0 | c0 c1 | ·
    position    0  1  2 |  3  4  5 |  3  4 |  0 |  1  2 | 0
    segment     0  0  0 |  1  1  1 |  2  2 |  S | S+1 … | -1    a token sees its prompt and its own, never later ones
    predicts   .. .. a0/b0  a1 a2  ·   b1  ·  c0 | c1  ·        the last prompt token predicts every first reply token

S is `SEGMENTS`, which leaves room for as many replies behind one prompt. A padded batch is the special case of one
reply per row. Response tokens that are not trained (a user's message between two replies) are attended to and nothing
else. Suffixes: R rows, L tokens in a row, N trained response tokens (flat, sequence after sequence).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

import torch

from grpo.dealing import Work, deal, deal_in_rounds

PADDING = -1
SEGMENTS = 2**20
"""A prompt is segment number k · SEGMENTS of its row, k counting from 0, and its replies are those that follow."""


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """Replies to train on, as they were sampled: one, or all of a conversation (`grpo.model.sequences`)."""

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


def prompt_of(segment: torch.Tensor) -> torch.Tensor:
    """The segment of the prompt that each one follows; of a prompt its own. Of padding one that there is not."""
    return segment & -SEGMENTS


def visibility(segment_RL: torch.Tensor) -> Callable[..., torch.Tensor]:
    """may_look(row, head, query, key), of indices that broadcast: True where the query may look at the key.

    Padding attends to itself (its segment equals its own), so no row of the softmax is empty.
    """

    def may_look(row, _, query, key):
        own, seen = segment_RL[row, query], segment_RL[row, key]
        return (query >= key) & ((seen == own) | (seen == prompt_of(own)))

    return may_look


@dataclass(frozen=True, slots=True)
class _Row:
    blocks: tuple[tuple[TrainSequence, ...], ...]
    """Sequences that share a prompt, which stands before them."""

    @classmethod
    def of(cls, sequences: Iterable[TrainSequence]) -> _Row:
        blocks: dict[tuple[int, ...], list[TrainSequence]] = {}
        for sequence in sequences:
            blocks.setdefault(sequence.prompt_ids, []).append(sequence)
        return cls(tuple(map(tuple, blocks.values())))

    @property
    def sequences(self) -> list[TrainSequence]:
        return [sequence for block in self.blocks for sequence in block]

    def __len__(self) -> int:
        return sum(len(block[0].prompt_ids) + sum(len(one.response_ids) for one in block) for block in self.blocks)


def plan_micro_batches(
    sequences: Sequence[TrainSequence],
    *,
    max_tokens: int,
    share_prompt: bool = True,
    whole_samples: bool = False,
    pair_cost: float = 0.0,
    multiple: int = 1,
    rank: int = 0,
    num_ranks: int = 1,
) -> list[list[_Row]]:
    """The micro-batches of one of the ranks that the sequences are dealt to, as rows. Others may get fewer.

    No micro-batch is longer than `max_tokens`, padding to `multiple` counted unless a sequence fits only before that
    padding. Every sequence lands in exactly one row; with `whole_samples`, those of one sample (`number`) in one
    micro-batch. With `share_prompt`, sequences with the same prompt share rows, where a row of L tokens costs
    L + `pair_cost` · L². If pairs cost nothing, a micro-batch is one row, and the first ones of all ranks are about
    equal, and so the second. Otherwise rows with one prompt each, or one sequence each, are padded to the longest.

    Raises ValueError for an empty response, and for a sequence longer than the budget, or a sample that must stay
    whole.
    """
    samples: dict[int, list[TrainSequence]] = {}
    for index, sequence in enumerate(sequences):
        if not sequence.response_ids:
            raise ValueError("a reply without tokens cannot be trained on")
        samples.setdefault(sequence.number if whole_samples else index, []).append(sequence)
    joins = share_prompt and not pair_cost
    units = [_rows_of_unit(unit, share_prompt, joins) for unit in samples.values()]
    for unit, rows in zip(samples.values(), units, strict=True):
        num_tokens = len(rows) * max(map(len, rows))
        if num_tokens > max_tokens:
            what = "one sequence" if len(unit) == 1 else "the sequences of one sample"
            raise ValueError(
                f"update.max_tokens_per_micro_batch: {max_tokens} is less than {what} of {num_tokens} tokens; raise it"
            )
    works = _works(units, share_prompt)
    if joins:
        most = max([max_tokens // multiple * multiple, *(work.tokens for work in works)])
        shares = deal_in_rounds(works, num_ranks, most)[rank]
        return [[_joined(row for index in share for row in units[index])] for share in shares if share]
    own = [units[index] for index in deal(works, num_ranks)[rank]]
    return _padded_micro_batches(own, max_tokens, share_prompt, pair_cost, multiple)


def _rows_of_unit(unit: Sequence[TrainSequence], share_prompt: bool, joins: bool) -> list[_Row]:
    """One row where the sequences may lie in one, else a row for each."""
    row = _Row.of(unit)
    return [row] if joins or (share_prompt and len(row.blocks) == 1) else [_Row.of([sequence]) for sequence in unit]


def _joined(rows: Iterable[_Row]) -> _Row:
    return _Row.of(sequence for row in rows for sequence in row.sequences)


def _works(units: Sequence[list[_Row]], share_prompt: bool) -> list[Work]:
    """What the units cost. Those of a single prompt share it."""
    works, numbers = [], {}
    for index, rows in enumerate(units):
        num_tokens = sum(map(len, rows))
        if share_prompt and len(rows) == len(rows[0].blocks) == 1:
            prompt_ids = rows[0].sequences[0].prompt_ids
            number = numbers.setdefault(prompt_ids, index)
            works.append(Work(number, len(prompt_ids), num_tokens - len(prompt_ids)))
        else:
            works.append(Work(index, 0, num_tokens))
    return works


def _padded_micro_batches(
    units: Sequence[list[_Row]], max_tokens: int, share_prompt: bool, pair_cost: float, multiple: int
) -> list[list[_Row]]:
    """Rows of about one length make a micro-batch; siblings lie in as few rows as is cheapest."""
    groups: dict[tuple[int, ...], list[_Row]] = {}
    together: list[list[_Row]] = []  # rows that one micro-batch must hold
    for rows in units:
        if share_prompt and len(rows) == 1:
            groups.setdefault(rows[0].sequences[0].prompt_ids, []).append(rows[0])
        else:
            together.append(rows)
    together += [[row] for siblings in groups.values() for row in _cheapest_rows(siblings, max_tokens, pair_cost)]
    micro_batches: list[list[_Row]] = []
    # Ascending lengths: the newest rows hold the longest, so they set the padded size.
    for rows in sorted(together, key=lambda rows: max(map(len, rows))):
        num_rows = len(micro_batches[-1]) + len(rows) if micro_batches else 0
        if micro_batches and num_rows * padded_length(rows, multiple) <= max_tokens:
            micro_batches[-1] += rows
        else:
            micro_batches.append([*rows])
    return micro_batches


def _cheapest_rows(siblings: Sequence[_Row], max_tokens: int, pair_cost: float) -> list[_Row]:
    """The siblings in 1, 2, 3 … rows of about equal length, whichever number costs least and fits."""

    def cost(rows: list[_Row]) -> float:
        return sum(len(row) + pair_cost * len(row) ** 2 for row in rows)

    candidates = (_even_rows(siblings, number) for number in range(1, len(siblings) + 1))
    return min((rows for rows in candidates if max(map(len, rows)) <= max_tokens), key=cost)


def _even_rows(siblings: Sequence[_Row], number: int) -> list[_Row]:
    """Longest first, each to the row that is shortest so far."""
    rows: list[list[_Row]] = [[] for _ in range(number)]
    lengths = [0] * number
    for sibling in sorted(siblings, key=lambda sibling: -len(sibling)):
        shortest = min(range(number), key=lambda index: lengths[index])
        rows[shortest].append(sibling)
        lengths[shortest] += len(sibling)
    return [_joined(row) for row in rows]


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
        column = 0
        for number, block in enumerate(row.blocks):
            prompt_ids = block[0].prompt_ids
            start = len(prompt_ids)
            input_ids_RL[r, column : column + start] = torch.tensor(prompt_ids)
            position_ids_RL[r, column : column + start] = torch.arange(start)
            segment_RL[r, column : column + start] = number * SEGMENTS
            column += start
            last_of_prompt = r * length + column - 1
            for segment, sequence in enumerate(block, number * SEGMENTS + 1):
                num = len(sequence.response_ids)
                input_ids_RL[r, column : column + num] = torch.tensor(sequence.response_ids)
                position_ids_RL[r, column : column + num] = torch.arange(start, start + num)
                segment_RL[r, column : column + num] = segment
                before = [last_of_prompt, *range(r * length + column, r * length + column + num - 1)]
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
    return pack([_Row.of([nothing])], multiple)
