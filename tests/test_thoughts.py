"""What a reply thinks is sampled and perhaps trained, and never said: not to the user, not to a judge, not to BLEU."""

from __future__ import annotations

import asyncio

import pytest
from tokenizers import AddedToken

from grpo.model.sequences import Sample, train_sequences
from launch.train import model_notes
from rewards.interactivity import rubric
from rewards.scoring import Scorer, score_batch
from rewards.settings import RewardSettings
from rollout.chat import Chat
from rollout.conversation import Rollout, RolloutPlan
from rollout.engines.sharing import SharedEngine
from rollout.roles.simulator import UserTurn
from rollout.settings import RolloutSettings
from rollout.thoughts import never_ends, split_thought
from rollout.types import Conversation, Scenario
from tests.fake_engine import FakeEngine
from tests.test_templates import CHATML, Case, chat_of, ids_of, template

# As DeepSeek-R1's and the "thinking" Qwen3 models' do: every prompt ends within a thought, earlier ones are dropped.
OPENS = """
{%- for m in messages %}
    {%- set said = m.content %}
    {%- if m.role == 'assistant' and '</think>' in said %}
        {%- set said = said.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\\n' + said + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}
"""
KEEPS = OPENS.replace("'</think>' in said", "false")
PLAIN = template(CHATML, DEFAULT="You are Qwen.")
ASKS = "What tone do they want?\n</think>\n\nHere is your text."


class Listening:
    """A user that remembers what it was told."""

    def __init__(self):
        self.heard: list[str] = []

    async def answer(self, scenario, messages):
        self.heard.append(messages[-1]["content"])
        return UserTurn("And then?", satisfied=False)


def play(chat: Chat, *texts: str, **settings) -> tuple[Conversation, Listening]:
    """A conversation in which the engine samples exactly these replies; one without an end of turn is cut."""
    sampled = iter([ids_of(chat, text) for text in texts])
    engine = SharedEngine(FakeEngine(lambda request: next(sampled), chat.stop_ids))
    user = Listening()
    settings = RolloutSettings(
        user={"kind": "scripted"}, train_on="all_replies", continuations=1, max_assistant_turns=len(texts), **settings
    )
    scenario = Scenario("s/0", ({"role": "user", "content": "Hi."},), "goal", "", "Here is your text.", "s", 0)
    rollout = Rollout(settings, engine, chat, user)
    [[[talk]]] = asyncio.run(rollout.play([scenario], RolloutPlan(1, 1, 1.0, 0, 0), lambda talk: None))
    engine.close()
    return talk, user


def chat_with(text: str) -> Chat:
    return chat_of(Case(text, "<|im_end|>", "", ""))


@pytest.mark.parametrize(
    ("text", "opened", "thought", "said"),
    [
        ("Yes.", False, "", "Yes."),
        (ASKS, True, "What tone do they want?\n</think>\n\n", "Here is your text."),
        ("<think>\nHm.\n</think>\n\nYes.", False, "<think>\nHm.\n</think>\n\n", "Yes."),
        ("<think></think><think>a</think>b", False, "<think></think><think>a</think>", "b"),
        ("[THINK]Hm.[/THINK]Yes.", False, "[THINK]Hm.[/THINK]", "Yes."),
        ("<seed:think>Hm.</seed:think>Yes.", False, "<seed:think>Hm.</seed:think>", "Yes."),
        ("<thinking>Hm.</thinking> Yes.", False, "<thinking>Hm.</thinking> ", "Yes."),
        ("What tone do they", True, "What tone do they", ""),
        ("<think>What tone", False, "<think>What tone", ""),
        ("I say <think> and </think>.", False, "", "I say <think> and </think>."),
        ("a </think> b </think> c", True, "a </think> ", "b </think> c"),
    ],
)
def test_a_thought_is_all_up_to_its_mark_at_the_beginning_of_a_reply(text, opened, thought, said):
    assert split_thought(text, opened=opened) == (thought, said)
    assert never_ends(thought) == (bool(thought) and not said)


@pytest.mark.parametrize("form", [OPENS, KEEPS])
def test_only_what_follows_the_thought_is_said_judged_and_counted(form):
    chat = chat_with(form)
    talk, user = play(chat, ASKS + "<|im_end|>", "I see.\n</think>\n\nThe end.<|im_end|>")
    assert user.heard == ["Here is your text."]
    assert [m["content"] for m in talk.messages] == ["Hi.", "Here is your text.", "And then?", "The end."]
    value, counted = rubric(talk)
    assert value == 0.0 and counted["questions"] == 0  # the thought asks, what is said does not
    first_only, _ = play(chat, ASKS + "<|im_end|>")
    weights = {"bleu_score": 1.0, "token_amount": 1.0}
    settings = RewardSettings(weights=weights, bleu_score={"extract": "last"})
    scorer = Scorer(settings, chat, None, max_reply_tokens=100)
    [score] = asyncio.run(score_batch_of(scorer, first_only))
    assert score.values["bleu_score"] == pytest.approx(1.0)
    assert score.values["token_amount"] == len(ids_of(chat, "Here is your text.")) / 1000


async def score_batch_of(scorer, *talks):
    return await score_batch(scorer, talks)


def test_the_sampled_tokens_stay_as_they_were_thought_and_all():
    chat = chat_with(OPENS)
    talk, _ = play(chat, ASKS + "<|im_end|>", "I see.\n</think>\n\nThe end.<|im_end|>")
    assert [list(r.token_ids) for r in talk.replies] == [
        ids_of(chat, ASKS + "<|im_end|>"),
        ids_of(chat, "I see.\n</think>\n\nThe end.<|im_end|>"),
    ]
    assert list(talk.replies[0].prompt_ids) == ids_of(
        chat, "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


def test_later_prompts_follow_what_the_template_does_with_earlier_thoughts():
    dropping, keeping = chat_with(OPENS), chat_with(KEEPS)
    texts = (ASKS + "<|im_end|>", "I see.\n</think>\n\nThe end.<|im_end|>")
    talk, _ = play(dropping, *texts)
    assert list(talk.replies[1].prompt_ids) == ids_of(
        dropping,
        "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\nHere is your text.<|im_end|>\n"
        "<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n<think>\n",
    )
    assert not dropping.keeps_history
    talk, _ = play(keeping, *texts)
    assert talk.replies[1].prompt_ids[: len(talk.replies[0].ids)] == talk.replies[0].ids
    assert keeping.keeps_history


def test_a_thought_that_never_ends_says_nothing_and_counts_as_cut():
    chat = chat_with(OPENS)
    for text in ("What tone do they want?<|im_end|>", "What tone do they"):  # given up, or cut by the limit
        talk, user = play(chat, text, "Hm.</think>Yes.<|im_end|>")
        assert talk.ended == "length" and talk.first_reply_cut and user.heard == []
        assert talk.messages[-1]["content"] == ""
    talk, user = play(chat, ASKS + "<|im_end|>", "What tone do they want?<|im_end|>", "Hm.</think>Yes.<|im_end|>")
    assert talk.ended == "length" and not talk.first_reply_cut and len(talk.replies) == 2


def test_a_model_that_thinks_of_its_own_accord_is_heard_alike():
    chat = chat_with(PLAIN)
    assert not chat.thought_opening
    talk, user = play(chat, f"<think>\n{ASKS}<|im_end|>", "Bye.<|im_end|>")
    assert user.heard == ["Here is your text."] and talk.replies[1].text == "Bye."


def test_marks_that_are_special_tokens_are_found_too():
    chat = chat_with(PLAIN)
    special = [AddedToken("[THINK]", special=True), AddedToken("[/THINK]", special=True)]
    chat.tokenizer.add_special_tokens({"additional_special_tokens": special})
    chat = Chat(chat.tokenizer, chat.stop_ids)
    assert chat.read(ids_of(chat, "[THINK]Hm.[/THINK]Yes.<|im_end|>")) == ("[THINK]Hm.[/THINK]", "Yes.")


def test_thoughts_are_trained_unless_the_setting_says_otherwise():
    chat = chat_with(OPENS)
    texts = (ASKS + "<|im_end|>", "I see.\n</think>\n\nThe end.<|im_end|>")
    for train_thoughts, trained in (
        (True, [ids_of(chat, text) for text in texts]),
        (False, [ids_of(chat, "\n\nHere is your text.<|im_end|>"), ids_of(chat, "\n\nThe end.<|im_end|>")]),
    ):
        talk, _ = play(chat, *texts, train_thoughts=train_thoughts)
        sequences = train_sequences([[sample := Sample(0, talk.replies, 1.0)]], [1.0])
        assert sorted([s.response_ids[index] for index in s.trained] for s in sequences) == sorted(trained)
        assert all(len(s.sampler_logprobs) == len(s.trained) for s in sequences)
        assert sample.num_tokens == sum(map(len, trained))


def test_a_reply_that_is_all_an_untrained_thought_trains_nothing():
    chat = chat_with(OPENS)
    for text in ("What tone do they", "What tone do they<|im_end|>"):
        talk, _ = play(chat, text, train_thoughts=False)
        assert train_sequences([[Sample(0, talk.replies, 1.0)]], [1.0]) == []
    talk, _ = play(chat, "What tone do they", train_thoughts=True)
    assert len(train_sequences([[Sample(0, talk.replies, 1.0)]], [1.0])) == 1


def test_the_start_of_a_run_says_that_the_template_opens_thoughts():
    class Folder:
        num_embeddings, unused = 10**6, ()
        path = "model"

    for trained, told in ((True, "it is trained with the rest"), (False, "it is not trained")):
        [note] = [note for note in model_notes(Folder, chat_with(OPENS), trained) if "thought" in note]
        assert told in note and "(<think>)" in note
    assert not [note for note in model_notes(Folder, chat_with(PLAIN), True) if "thought" in note]
