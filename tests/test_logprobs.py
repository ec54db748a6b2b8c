"""The head's own function: log-probs, entropies and gradients block by block are those of whole logits."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from grpo.model import logprobs
from grpo.model.logprobs import LogprobHead

TOKENS, WIDTH, VOCABULARY, TEMPERATURE = 6, 5, 23, 0.7


def head(*, bias: bool = False, entropy: bool = True, dtype: torch.dtype = torch.float64) -> LogprobHead:
    torch.manual_seed(0)
    return LogprobHead(nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype), TEMPERATURE, entropy)


def inputs(scale: float = 1.0, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64) * scale
    # The first and last of the vocabulary, both sides of the first block's end, and one twice.
    return states.to(dtype).requires_grad_(), torch.tensor([0, 3, 4, 22, 11, 11])


def cut_into(monkeypatch: pytest.MonkeyPatch, columns: int, kept_columns: int = 0) -> None:
    monkeypatch.setattr(logprobs, "BLOCK_LOGITS", {"cpu": TOKENS * columns})
    monkeypatch.setattr(logprobs, "KEPT_LOGITS", {"cpu": TOKENS * kept_columns})


def whole(module: LogprobHead, states: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    table = (nn.functional.linear(states, module.weight, module.bias) / TEMPERATURE).log_softmax(-1)
    return table.gather(-1, target[:, None])[:, 0], -(table.exp() * table).sum(-1)


@pytest.mark.parametrize("columns, kept_columns", [(1, 0), (2, 5), (4, 9), (4, 1000), (12, 0), (23, 23), (1000, 1000)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_blocks_of_any_size_give_what_whole_logits_give(monkeypatch, columns, kept_columns, bias, entropy):
    cut_into(monkeypatch, columns, kept_columns)
    module, (states, target) = head(bias=bias, entropy=entropy), inputs()
    weights = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)
    gradients = []
    for found in (module(states, target), whole(module, states, target)):
        ((found[0] + (found[1] if entropy else 0)) * weights).sum().backward()
        gradients.append([tensor.grad for tensor in (states, *module.parameters())])
        for tensor in (states, *module.parameters()):
            tensor.grad = None
    torch.testing.assert_close(module(states, target), whole(module, states, target), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    assert module(states, target)[1].requires_grad == entropy


@pytest.mark.parametrize("columns", [7, 1000])
def test_gradients_are_finite_differences(monkeypatch, columns):
    cut_into(monkeypatch, columns)
    module, (states, target) = head(bias=True), inputs()
    weight, bias = module.weight, module.bias

    def outcome(states, weight, bias):
        return logprobs._HeadLogprobs.apply(states, weight, bias, target, TEMPERATURE, True, TOKENS * 14)

    assert torch.autograd.gradcheck(outcome, (states, weight, bias))


@pytest.mark.parametrize("columns", [4, 1000])
def test_large_logits_neither_overflow_nor_vanish(monkeypatch, columns):
    cut_into(monkeypatch, columns, kept_columns=24)
    module, (states, target) = head(dtype=torch.float32), inputs(scale=1000.0, dtype=torch.float32)
    found, entropies = module(states, target)
    gradients = [*torch.autograd.grad(found.sum() + entropies.sum(), [states, module.weight])]
    wide = states.detach().double().requires_grad_()
    expected, expected_entropies = whole(module.double(), wide, target)
    assert found.isfinite().all() and found.min() < -300  # exp of which is 0 in float32
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(entropies, expected_entropies.float(), rtol=1e-3, atol=1e-5)
    by_hand = torch.autograd.grad(expected.sum() + expected_entropies.sum(), [wide, module.weight])
    torch.testing.assert_close(gradients, [gradient.float() for gradient in by_hand], rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("columns", [4, 1000])
def test_tokens_that_are_ruled_out_leave_the_others_their_log_probs(monkeypatch, columns):
    # A whole block of them, the first.
    cut_into(monkeypatch, columns, kept_columns=1000)
    module, (states, target) = head(bias=True, entropy=False), inputs()
    target = target.clamp(min=5)
    with torch.no_grad():
        module.bias[:4] = -torch.inf
    found = module(states, target)[0]
    torch.testing.assert_close(found, whole(module, states, target)[0])
    found.sum().backward()
    assert states.grad.isfinite().all() and (module.weight.grad[:4] == 0).all()


@pytest.mark.parametrize("kept_columns", [0, 8])
def test_bfloat16_logits_are_summed_in_float32(monkeypatch, kept_columns):
    cut_into(monkeypatch, 4, kept_columns)
    module, (states, target) = head(dtype=torch.bfloat16), inputs(dtype=torch.bfloat16)
    found, entropies = module(states, target)
    blocks = [nn.functional.linear(states, weight) for weight in module.weight.split(4)]
    table = (torch.cat(blocks, -1).float() / TEMPERATURE).log_softmax(-1)
    assert found.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close(found, table.gather(-1, target[:, None])[:, 0])
    torch.testing.assert_close(entropies, -(table.exp() * table).sum(-1))
    found.sum().backward()
    assert states.grad.dtype == module.weight.grad.dtype == torch.bfloat16
    expected = torch.autograd.grad(table.gather(-1, target[:, None]).sum(), [states, module.weight])
    torch.testing.assert_close([states.grad, module.weight.grad], [*expected], rtol=2e-2, atol=2e-2)


def watch_blocks(monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[int, ...]], list[int], list[weakref.ref]]:
    """(shape, number of blocks alive just before, weak reference) of every block of logits that is computed."""
    shapes, alive_before, blocks, compute = [], [], [], logprobs._logits

    def watched(*arguments):
        alive_before.append(sum(block() is not None for block in blocks))
        logits = compute(*arguments)
        shapes.append(tuple(logits.shape))
        blocks.append(weakref.ref(logits))
        return logits

    monkeypatch.setattr(logprobs, "_logits", watched)
    return shapes, alive_before, blocks


@pytest.mark.parametrize("most", [0, 1, 2, 3])
def test_as_many_blocks_of_logits_wait_for_backward_as_may_and_the_others_are_computed_again(monkeypatch, most):
    cut_into(monkeypatch, 10, kept_columns=8 * most)
    shapes, alive_before, blocks = watch_blocks(monkeypatch)
    module, (states, target) = head(), inputs()
    found, _ = module(states, target)
    assert max(alive_before) <= max(most - 1, 0)
    assert sum(block() is not None for block in blocks) == most
    found.sum().backward()
    assert max(alive_before) <= most  # autograd holds them until backward returns
    forward = [(TOKENS, 8), (TOKENS, 8), (TOKENS, 7)]  # three blocks of at most 10, about equal
    assert shapes == forward + [forward[-1]] * (most == 0) + [(TOKENS, 8)] * min(2, 3 - most)


def test_nothing_waits_where_there_is_no_backward(monkeypatch):
    cut_into(monkeypatch, 10, kept_columns=1000)
    _, alive_before, _ = watch_blocks(monkeypatch)
    module, (states, target) = head(), inputs()
    with torch.no_grad():
        module(states, target)
    assert alive_before == [0, 0, 0]


def test_backward_can_run_again(monkeypatch):
    cut_into(monkeypatch, 10, kept_columns=16)
    module, (states, target) = head(), inputs()
    found, entropies = module(states, target)
    total = (found + entropies).sum()
    first, second = (torch.autograd.grad(total, [states, module.weight], retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("num_tokens", [1, 2_000, 8_192, 12_288])
def test_blocks_are_aligned_and_within_the_bound(num_tokens):
    weight = torch.empty(151_936, 1, device="meta")
    logprobs_of_device = logprobs.BLOCK_LOGITS | {"meta": 2**27}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "BLOCK_LOGITS", logprobs_of_device)
        blocks = [*logprobs._blocks(num_tokens, weight)]
    widths = [block.stop - block.start for block in blocks]
    assert sum(widths) == 151_936 and max(widths) * num_tokens <= 2**27
    assert all(width % 128 == 0 for width in widths)
    assert [block.start for block in blocks[1:]] == [block.stop for block in blocks[:-1]]


def test_a_frozen_weight_gets_no_gradient(monkeypatch):
    cut_into(monkeypatch, 4, kept_columns=8)
    module, (states, target) = head(), inputs()
    module.requires_grad_(False)
    module(states, target)[0].sum().backward()
    assert module.weight.grad is None and states.grad.abs().sum() > 0
