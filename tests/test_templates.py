"""Chat templates over several turns: what was sampled stays as it was, and nothing else is trained."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo.model.packing import pack, plan_micro_batches
from grpo.model.sequences import Sample, train_sequences
from rollout.chat import Chat
from rollout.conversation import Rollout, RolloutPlan
from rollout.engines.sharing import SharedEngine
from rollout.roles.simulator import UserTurn
from rollout.settings import RolloutSettings
from rollout.types import Conversation, Message, Scenario
from tests.fake_engine import FakeEngine
from tests.tiny import TEMPLATE, make_model

SPECIAL = (
    "<|im_start|> <|im_end|> <|endoftext|> <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>".split()
)
MERGES = [("h", "e"), ("i", "n"), ("a", "t"), ("o", "u"), ("Ġ", "t"), ("Ġt", "he")]

CHATML = """
{%- for m in messages %}
    {%- if loop.first and m.role != 'system' %}{{ '<|im_start|>system\\n' + DEFAULT + '<|im_end|>\\n' }}{% endif %}
    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
LLAMA3 = """
{%- for m in messages %}
    {%- if loop.first %}{{ '<|begin_of_text|>' }}{% endif %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
# Thoughts stay only in replies after the user's last message; a prompt without thinking begins the reply with none.
THINKING = """
{%- set spot = namespace(last_user=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set spot.last_user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- set said = m.content %}
    {%- if m.role == 'assistant' and '</think>' in said and loop.index0 < spot.last_user %}
        {%- set said = said.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\\n' + said + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if EMPTY_BLOCK and enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

SHOUTING = """
{%- for m in messages %}
    {%- set said = m.content | upper if m.role == 'assistant' else m.content %}
    {{- '<|im_start|>' + m.role + '\\n' + said + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def template(text: str, **names: object) -> str:
    return "".join(f"{{%- set {name} = {value!r} %}}" for name, value in names.items()) + text


@dataclass(frozen=True)
class Case:
    template: str
    stop: str
    first_prompt: str
    """Of a user who says "Hi."."""
    between: str
    """What the template puts from a reply's end to the next, where the user says "And then?"."""


CASES = {
    "Qwen2.5": Case(
        template(CHATML, DEFAULT="You are Qwen."),
        "<|im_end|>",
        "<|im_start|>system\nYou are Qwen.<|im_end|>\n<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "SmolLM2": Case(
        template(CHATML, DEFAULT="You are SmolLM."),
        "<|im_end|>",
        "<|im_start|>system\nYou are SmolLM.<|im_end|>\n<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "Llama-3": Case(
        LLAMA3,
        "<|eot_id|>",
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi.<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|start_header_id|>user<|end_header_id|>\n\nAnd then?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "drops thoughts": Case(
        template(THINKING, EMPTY_BLOCK=False),
        "<|im_end|>",
        "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "Qwen3": Case(
        template(THINKING, EMPTY_BLOCK=True),
        "<|im_end|>",
        "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "",
    ),
}
EXACT = [name for name in CASES if name != "Qwen3"]
REPLIES = ["What is the tone?", "\nNothing within the hour… \n", "The end."]


def chat_of(case: Case) -> Chat:
    """A tokenizer of bytes and a few merges, with the template."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate([*symbols, *("".join(pair) for pair in MERGES)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in ("<think>", "</think>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=case.stop)
    fast.chat_template = case.template
    return Chat(fast, [fast.convert_tokens_to_ids(token) for token in (case.stop, "<|endoftext|>")])


def ids_of(chat: Chat, text: str, *, merged: bool = True) -> list[int]:
    """Of text with special tokens; unmerged, a token for each byte, as a sampler may well draw them."""
    ids = chat.tokenizer(text, add_special_tokens=False)["input_ids"]
    if merged:
        return ids
    bytes_of = {"".join(pair): pair for pair in MERGES}
    tokens = chat.tokenizer.convert_ids_to_tokens(ids)
    while any(token in bytes_of for token in tokens):
        tokens = [part for token in tokens for part in bytes_of.get(token, (token,))]
    return chat.tokenizer.convert_tokens_to_ids(tokens)


class Curious:
    async def answer(self, scenario: Scenario, messages: list[Message]) -> UserTurn:
        return UserTurn("And then?", satisfied=False)


def converse(chat: Chat, sampled: list[list[int]]) -> Conversation:
    """Three turns, of which the engine samples exactly these."""
    waiting = iter(sampled)
    engine = SharedEngine(FakeEngine(lambda request: next(waiting), chat.stop_ids))
    settings = RolloutSettings(user={"kind": "scripted"}, train_on="all_replies", continuations=1)
    scenario = Scenario("s/0", ({"role": "user", "content": "Hi."},), "", "", None, "s", 0)
    rollout = Rollout(settings, engine, chat, Curious())
    [[[talk]]] = asyncio.run(rollout.play([scenario], RolloutPlan(1, 1, 1.0, 0, 0), lambda talk: None))
    engine.close()
    assert talk.ended == "turn_limit" and len(talk.replies) == 3
    return talk


def sequences_of(talk: Conversation):
    return train_sequences([[Sample(0, talk.replies, 1.0)]], [1.0])


def trained_ids(talk: Conversation) -> list[int]:
    """The targets of the packed batch."""
    [rows] = plan_micro_batches(sequences_of(talk), max_tokens=10_000)
    return pack(rows).target_N.tolist()


@pytest.mark.parametrize("name", EXACT)
def test_each_prompt_begins_with_exactly_what_was_sampled_before(name: str):
    case = CASES[name]
    chat = chat_of(case)
    sampled = [ids_of(chat, text + case.stop, merged=False) for text in REPLIES]
    assert sampled[0] != ids_of(chat, REPLIES[0] + case.stop)  # tokenizing the text again would give others
    talk = converse(chat, sampled)
    assert chat.keeps_history
    assert [list(reply.token_ids) for reply in talk.replies] == sampled
    between = ids_of(chat, case.between)
    expected = ids_of(chat, case.first_prompt)
    for reply in talk.replies:
        assert list(reply.prompt_ids) == expected
        expected = [*reply.ids, *between]
    [sequence] = sequences_of(talk)
    assert sequence.prompt_ids == talk.replies[0].prompt_ids
    assert [sequence.response_ids[index] for index in sorted(sequence.context)] == between * 2
    assert trained_ids(talk) == sum(sampled, [])


@pytest.mark.parametrize("name", EXACT)
def test_what_follows_a_reply_is_what_the_template_renders(name: str):
    # Where the sampled tokens are those of the text, the prompts are the template's own, token by token.
    case = CASES[name]
    chat = chat_of(case)
    talk = converse(chat, [ids_of(chat, text.strip() + case.stop) for text in REPLIES])
    for number, reply in enumerate(talk.replies):
        assert list(reply.prompt_ids) == chat.prompt_ids(talk.messages[: 1 + 2 * number])


def assert_a_sequence_for_each_reply(chat: Chat, talk: Conversation, sampled: list[list[int]]) -> None:
    for number, reply in enumerate(talk.replies):
        assert list(reply.prompt_ids) == chat.prompt_ids(talk.messages[: 1 + 2 * number])
    sequences = sequences_of(talk)
    assert [sequence.number for sequence in sequences] == [0, 0, 0]
    for sequence, reply in zip(sequences, talk.replies, strict=True):
        assert sequence.prompt_ids + sequence.response_ids == reply.ids
        assert tuple(sequence.response_ids[index] for index in sequence.trained) == reply.token_ids
    assert len({sequence.prompt_ids for sequence in sequences}) == 1  # so that they share a row
    assert sorted(trained_ids(talk)) == sorted(sum(sampled, []))


def test_qwen3_drops_the_empty_thinking_block_so_each_reply_is_a_sequence_of_its_own():
    case = CASES["Qwen3"]
    chat = chat_of(case)
    assert not chat.keeps_history and "one sequence per reply" in chat.history_note
    sampled = [ids_of(chat, text + case.stop, merged=False) for text in REPLIES]
    talk = converse(chat, sampled)
    assert list(talk.replies[0].prompt_ids) == ids_of(chat, case.first_prompt)
    assert ids_of(chat, "<think>")[0] not in talk.replies[2].prompt_ids[:-6]  # only in what asks for the reply
    assert_a_sequence_for_each_reply(chat, talk, sampled)


@pytest.mark.parametrize("name", ["drops thoughts", "Qwen3"])
def test_a_reply_that_thinks_is_trained_with_its_thoughts_and_not_conditioned_on_later(name: str):
    case = CASES[name]
    chat = chat_of(case)
    sampled = [
        ids_of(chat, f"<think>\nthe {n}\n</think>\n\n{text.strip()}{case.stop}") for n, text in enumerate(REPLIES)
    ]
    talk = converse(chat, sampled)
    assert_a_sequence_for_each_reply(chat, talk, sampled)
    assert "the 0" not in chat.tokenizer.decode(talk.replies[1].prompt_ids)


def test_only_from_the_reply_that_thought_on_is_history_rendered_anew():
    case = CASES["drops thoughts"]
    chat = chat_of(case)
    texts = ["Hm.", "<think>\nthe rest\n</think>\n\nYes.", "Bye."]
    sampled = [ids_of(chat, text + case.stop) for text in texts]
    talk = converse(chat, sampled)
    assert talk.replies[1].prompt_ids[: len(talk.replies[0].ids)] == talk.replies[0].ids
    sequences = sequences_of(talk)
    assert len(sequences) == 2
    trained = [[s.response_ids[index] for index in s.trained] for s in sequences]
    assert trained == [sampled[0] + sampled[1], sampled[2]]


def test_a_reply_that_ended_on_another_stop_token_than_the_templates_is_not_in_the_history():
    # Sampled <|endoftext|>, rendered <|eot_id|>: the later prompts are the template's.
    case = CASES["Llama-3"]
    chat = chat_of(case)
    sampled = [ids_of(chat, REPLIES[0] + "<|endoftext|>")] + [ids_of(chat, text + case.stop) for text in REPLIES[1:]]
    talk = converse(chat, sampled)
    assert list(talk.replies[1].prompt_ids) == chat.prompt_ids(talk.messages[:3])
    assert len(sequences_of(talk)) == 2 and sorted(trained_ids(talk)) == sorted(sum(sampled, []))


def test_a_template_that_changes_the_words_of_history_is_found_out_even_where_their_number_stays():
    case = Case(SHOUTING, "<|im_end|>", "", "")
    chat = chat_of(case)
    assert not chat.keeps_history
    sampled = [ids_of(chat, text.strip() + case.stop) for text in REPLIES]
    assert_a_sequence_for_each_reply(chat, converse(chat, sampled), sampled)


def load(folder, text: str) -> Chat:
    make_model(folder)
    (folder / "chat_template.jinja").write_text(text)
    return Chat.load(folder)


def test_a_template_that_does_not_ask_for_the_reply_is_refused(tmp_path):
    silent = TEMPLATE.partition("{% if add_generation_prompt %}")[0]
    with pytest.raises(ValueError, match="renders nothing to ask for the assistant's reply, .* '<assistant> '"):
        load(tmp_path / "silent", silent)
    # Some have nothing to say there: the model's words follow the user's.
    plain = "{% for m in messages %}{{ m.content }} <end> {% endfor %}"
    assert load(tmp_path / "plain", plain).prompt_ids([{"role": "user", "content": "hello"}])


def test_a_template_that_leaves_the_users_message_out_is_refused(tmp_path):
    deaf = TEMPLATE.replace("{{ m.content }}", "{{ m.text }}")
    with pytest.raises(ValueError, match="renders nothing of the user's message; it must write message.content"):
        load(tmp_path / "deaf", deaf)


def test_a_template_that_wants_content_parts_is_given_them(tmp_path):
    parts = TEMPLATE.replace("{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}")
    chat, plain = load(tmp_path / "parts", parts), load(tmp_path / "plain", TEMPLATE)
    talk = [{"role": role, "content": "bees"} for role in ("user", "assistant", "user")]
    assert chat.prompt_ids(talk) == plain.prompt_ids(talk)
    assert chat.keeps_history


def test_a_tokenizer_without_a_template_says_what_to_add(tmp_path):
    make_model(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="has no chat template; .* add chat_template.jinja"):
        Chat.load(tmp_path / "model")
