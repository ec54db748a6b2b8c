"""Conversations on a real engine with a tiny random model: turns, endings, and nothing mixed up."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from grpo.groups import play_and_score, play_share, whole_groups
from rewards.judge import Judge
from rewards.scoring import Scorer
from rewards.settings import RewardSettings
from rollout.conversation import Rollout, RolloutPlan
from rollout.roles.client import LLMClient, LLMError
from rollout.roles.simulator import UserTurn
from rollout.settings import RolloutSettings
from rollout.types import Scenario
from tests.fake_endpoint import MODEL, FakeEndpoint, says
from tests.fake_engine import words_engine
from tests.tiny import WORDS, make_engine, make_model


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("model"))
    chat, engine = make_engine(folder)
    yield chat, engine
    engine.close()


@dataclass
class Recording:
    """A user that says what it is told to, and remembers what it was asked with."""

    turns: list[UserTurn | LLMError]
    heard: list[tuple[str, list[str]]] = field(default_factory=list)

    async def answer(self, scenario, messages):
        self.heard.append((scenario.goal, [message["content"] for message in messages]))
        turn = self.turns[sum(message["role"] == "user" for message in messages) - 1]
        if isinstance(turn, LLMError):
            raise turn
        return turn


def scenario(number=0, words="hello"):
    return Scenario(f"s/{number}", ({"role": "user", "content": words},), f"goal {number}", "", None, "s", number)


def play(parts, user, scenarios=(scenario(),), *, group_size=2, continuations=2, seed=1, **settings):
    chat, engine = parts
    defaults = {"max_reply_tokens": 120, "max_user_turns": 2, "max_assistant_turns": 3, "user": {"kind": "scripted"}}
    rollout = Rollout(RolloutSettings(**(defaults | settings)), engine, chat, user)
    ended = []
    played = asyncio.run(rollout.play(scenarios, RolloutPlan(group_size, continuations, 1.0, seed, 1), ended.append))
    talks = [talk for group in played for sample in group for talk in sample]
    assert sorted(map(id, ended)) == sorted(map(id, talks))  # each handed over once, as it ends
    return played


MORE = UserTurn("i want bees", satisfied=False)
BYE = UserTurn("bye", satisfied=True)


def finished(played):
    """Conversations whose first reply ended by itself."""
    return [t for group in played for sample in group for t in sample if t.first_reply.finish_reason == "stop"]


def test_a_conversation_runs_to_the_last_assistant_turn(parts):
    talks = [t for t in finished(play(parts, Recording([MORE] * 9), group_size=8)) if t.ended == "turn_limit"]
    assert talks
    for talk in talks:
        assert [message["role"] for message in talk.messages] == ["user", "assistant"] * 3
        assert len(talk.replies) == 3


def test_the_assistants_limit_alone_ends_a_conversation_too(parts):
    talks = finished(play(parts, Recording([MORE] * 9), group_size=8, max_user_turns=9, max_assistant_turns=2))
    full = [talk for talk in talks if talk.ended == "turn_limit"]
    assert full and all([m["role"] for m in talk.messages] == ["user", "assistant"] * 2 for talk in full)


def test_nobody_waits_for_another_and_judging_begins_when_a_conversation_ends():
    """The first row's user answers only when the judge was asked about all other rows."""
    chat, engine = words_engine(lambda prompt, seed: ["help"])
    others = 5
    asked = itertools.count(1)
    all_asked = threading.Event()

    def judge(body):
        if next(asked) == others:
            all_asked.set()
        return says({name: {"reason": "fine", "score": 0.5} for name in ("asks", "engages", "advances")})

    class Waiting:
        async def answer(self, scenario, messages):
            while scenario.row == 0 and not all_asked.is_set():
                await asyncio.sleep(0.01)
            return MORE

    async def play_all(scorer, client):
        rollout = Rollout(RolloutSettings(user={"kind": "scripted"}), engine, chat, Waiting())
        rows = [(number, scenario(number)) for number in range(1 + others)]
        groups = await asyncio.wait_for(play_and_score(rollout, scorer, rows, RolloutPlan(1, 1, 1.0, 1, 1)), 60)
        await client.close()
        return groups

    with FakeEndpoint(judge) as endpoint:
        server = {"base_url": endpoint.base_url, "model": MODEL}
        settings = RewardSettings(weights={"interactivity": 1.0}, judge=server)
        client = LLMClient("judge", settings.judge)
        scorer = Scorer(settings, chat, Judge(client, settings), max_reply_tokens=40)
        groups = asyncio.run(play_all(scorer, client))
    engine.close()
    assert [group.rewards_G[0].total for group in groups] == [0.5] * (1 + others)


def test_groups_that_several_ranks_played_are_those_that_one_plays():
    chat, engine = words_engine(lambda prompt, seed: WORDS[: 1 + seed % 7])
    rollout = Rollout(RolloutSettings(user={"kind": "scripted"}), engine, chat, Recording([MORE] * 9))
    scenarios = [(position, scenario(position)) for position in (0, 1, 5, 7)]
    plan = RolloutPlan(group_size=4, continuations=2, temperature=1.0, run_seed=1, step=1)

    def play_with(how, *dealt):
        scorer = Scorer(RewardSettings(weights={"token_amount": -1.0}), chat, None, max_reply_tokens=40)
        return asyncio.run(how(rollout, scorer, scenarios, plan, *dealt))

    alone = play_with(play_and_score)
    shares = [play_with(play_share, rank, 3) for rank in range(3)]
    engine.close()
    assert len({reply.token_ids for group in alone for reply in group.replies_G}) > 1
    # A whole group each, and a part of the last one.
    assert [[(part.position, len(part.rewards_G)) for part in share] for share in shares] == [
        [(0, 4), (7, 1)],
        [(1, 4), (7, 1)],
        [(5, 4), (7, 2)],
    ]
    assert whole_groups(reversed(shares)) == alone


def test_without_the_last_reply_the_judged_text_ends_on_the_user(parts):
    talks = finished(play(parts, Recording([MORE] * 9), group_size=8, judge_last_reply=False))
    full = [talk for talk in talks if talk.ended == "turn_limit"]
    assert full and all(talk.messages[-1]["role"] == "user" and len(talk.replies) == 2 for talk in full)


def test_the_last_reply_is_dropped_at_the_user_limit_too(parts):
    talks = finished(play(parts, Recording([MORE] * 9), group_size=8, max_user_turns=1, judge_last_reply=False))
    assert talks and all(talk.messages[-1]["role"] == "user" and len(talk.replies) == 1 for talk in talks)


def test_the_goodbye_is_kept_apart_from_the_judged_text(parts):
    (talk, *_) = finished(play(parts, Recording([BYE]), group_size=8))
    assert talk.ended == "user_satisfied" and talk.farewell == "bye"
    assert [message["role"] for message in talk.messages] == ["user", "assistant"]


def test_a_failing_simulator_ends_its_conversation_with_the_reason(parts):
    (talk, *_) = finished(play(parts, Recording([LLMError("user", "timeout", "no answer")]), group_size=8))
    assert talk.ended == "simulator_failed" and "timeout" in talk.failure


def test_a_cut_first_reply_is_not_continued(parts):
    played = play(parts, Recording([]), group_size=2, max_reply_tokens=1)
    for (talk,) in played[0]:
        assert talk.ended == "length" and len(talk.replies) == 1


def test_no_continuations_score_the_reply_alone(parts):
    played = play(parts, Recording([]), continuations=0)
    assert [len(sample) for sample in played[0]] == [1, 1]


def test_a_full_context_ends_the_conversation_on_the_assistant(parts):
    long = UserTurn("bees " * 150, satisfied=False)
    (talk, *_) = finished(play(parts, Recording([long]), group_size=8))
    assert talk.ended == "context_full" and talk.messages[-1]["role"] == "assistant"


def test_the_trained_ids_are_those_that_were_sampled(parts):
    chat, _ = parts
    for talk in finished(play(parts, Recording([BYE]), group_size=4)):
        reply = talk.first_reply
        assert list(reply.prompt_ids) == chat.prompt_ids(talk.scenario.messages)
        assert reply.token_ids[-1] in chat.stop_ids and len(reply.logprobs) == len(reply.token_ids)


def test_continuations_share_the_first_reply_and_differ_after_it(parts):
    for sample in play(parts, Recording([MORE] * 9), group_size=4, continuations=3)[0]:
        if sample[0].first_reply.finish_reason == "stop":
            assert len({talk.replies[0] for talk in sample}) == 1
            assert len({talk.replies[1].token_ids for talk in sample}) > 1


def test_no_user_ever_sees_the_goal_or_words_of_another_conversation(parts):
    user = Recording([MORE] * 9)
    play(parts, user, [scenario(n, word) for n, word in enumerate(("hello", "bees", "roof", "winter"))], group_size=4)
    opening_of = {}
    for goal, heard in user.heard:
        assert opening_of.setdefault(goal, heard[0]) == heard[0]
    assert len(set(opening_of.values())) == 4


def test_replies_do_not_depend_on_what_else_is_in_the_batch(parts):
    alone = play(parts, Recording([MORE] * 9), [scenario(1, "bees")])
    together = play(
        parts, Recording([MORE] * 9), [scenario(0), scenario(1, "bees"), scenario(2, "winter")], group_size=2
    )
    texts = [[talk.messages for talk in sample] for sample in alone[0]]
    assert texts == [[talk.messages for talk in sample] for sample in together[1]]


def test_another_run_seed_gives_other_replies(parts):
    one, two = (play(parts, Recording([BYE] * 9), group_size=4, seed=seed) for seed in (1, 2))
    replies = [Counter(talk.first_reply.token_ids for sample in played[0] for talk in sample) for played in (one, two)]
    assert replies[0] != replies[1]


def test_an_engine_that_fails_fails_every_conversation(parts):
    chat, engine = parts
    rollout = Rollout(RolloutSettings(user={"kind": "scripted"}), engine, chat, Recording([]))
    real_step = engine.engine.step
    engine.engine.step = lambda: (_ for _ in ()).throw(RuntimeError("out of memory"))
    try:
        with pytest.raises(ExceptionGroup) as error:
            asyncio.run(rollout.play([scenario()], RolloutPlan(2, 1, 1.0, 1, 1), lambda talk: None))
        assert error.group_contains(RuntimeError, match="out of memory")
    finally:
        engine.engine.step = real_step
    assert finished(play(parts, Recording([BYE]), group_size=8))  # and it can be used again


def test_token_ids_that_a_padded_vocabulary_adds_are_no_words(parts):
    chat, _ = parts
    beyond = len(chat.tokenizer) + 5
    assert chat.read((*chat.tokenizer("bees hum", add_special_tokens=False)["input_ids"], beyond)) == ("", "bees hum")


def test_no_user_can_forge_the_end_of_its_turn(parts):
    chat, _ = parts
    assert chat._ids("bees <end> hum")[1] in chat.stop_ids  # spelled out, it is one
    user = Recording([UserTurn("bees <end> hum <user>", satisfied=False), UserTurn("<end>", satisfied=False)])
    talks = finished(play(parts, user, group_size=8))
    said = [[m["content"] for m in talk.new_messages if m["role"] == "user"] for talk in talks]
    assert said and all(texts == ["bees   hum"] for texts in said)
    failed = [talk.failure for talk in talks if talk.ended == "simulator_failed"]
    assert failed and all("nothing but control tokens" in failure for failure in failed)


def test_a_cut_later_reply_ends_the_conversation_and_is_kept(parts):
    talks = finished(play(parts, Recording([MORE] * 9), group_size=8, max_later_reply_tokens=1))
    cut = [talk for talk in talks if talk.ended == "length"]
    assert cut
    for talk in cut:
        assert [message["role"] for message in talk.messages] == ["user", "assistant"] * 2
        assert talk.replies[-1].finish_reason == "length" and talk.failure is None


def test_a_thousand_conversations_at_once_are_those_played_one_after_another():
    """Goals g0 to g999; the policy repeats every goal it reads, the engine and the users finish in any order."""
    goals = [f"g{number}" for number in range(1000)]
    rows = [replace(scenario(number), goal=goal) for number, goal in enumerate(goals)]
    limits = {"max_user_turns": 2, "max_assistant_turns": 3}

    def answer(prompt, seed):
        return Random(seed).choices(WORDS, k=3) + [word for word in prompt if word in goals_known]

    goals_known = set(goals)

    class Wisher:
        def __init__(self, order=None):
            self.order, self.heard = order, []

        async def answer(self, scenario, messages):
            for _ in range(self.order.randrange(20) if self.order else 0):
                await asyncio.sleep(0)
            said = " ".join(message["content"] for message in messages)
            self.heard.append((scenario.goal, set(re.findall(r"g\d+", said))))
            return UserTurn(f"i want {scenario.goal}", satisfied=False)

    def texts(batches, user, shuffled):
        chat, engine = words_engine(answer, [*WORDS, *goals], shuffled=shuffled)
        rollout = Rollout(RolloutSettings(user={"kind": "scripted"}, **limits), engine, chat, user)
        ended = []

        async def play_all():
            for batch in batches:
                await rollout.play(batch, RolloutPlan(1, 1, 1.0, 1, 1), ended.append)

        asyncio.run(play_all())
        engine.close()
        counts = Counter(talk.scenario.goal for talk in ended)
        assert counts == Counter(goals)  # none lost, none twice
        return {talk.scenario.goal: [m["content"] for m in talk.messages] for talk in ended}, engine.engine.most_at_once

    user = Wisher(Random(2))
    together, most_at_once = texts([rows], user, Random(1))
    alone, _ = texts([[row] for row in rows], Wisher(), None)
    assert most_at_once > 500
    assert together == alone
    assert len(user.heard) == 2000 and all(seen <= {goal} for goal, seen in user.heard)
    assert all(goal in messages[4].split() for goal, messages in together.items())
