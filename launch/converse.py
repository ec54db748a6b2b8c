"""Plays conversations without training and shows them, to judge prompts, users and rewards before paying for a run.

    python -m launch.converse --config FILE [--n 8] [--split validation] [--out FILE.jsonl] [section.key=value ...]

Engine, simulated user and rewards are the run's own; model.path=runs/NAME/model plays a trained model. Each prompt
gets one conversation: training prompts as training samples them, held-out ones as an evaluation of the run plays them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import indent

import torch
import transformers
from transformers import AutoModelForCausalLM

from grpo.config import Config
from grpo.config_file import load_config
from grpo.evidence.evaluate import evaluation_plan
from grpo.evidence.metrics import conversation_metrics
from grpo.evidence.traces import trace_rows
from grpo.groups import Group, play_and_score
from grpo.model.room import check_own_gpu
from grpo.model.sync import push_weights
from grpo.ranks import end_process
from grpo.run.recorder import write_rows
from launch.terminal import drop_output, printable
from launch.train import Inputs, build_rollout, build_scorer, fail, read_inputs, say, settings_parser
from rewards.scoring import ReplyReward, Scorer
from rollout.conversation import Rollout, RolloutPlan
from rollout.engines.weight_names import stored_weights
from rollout.settings import user_path
from rollout.types import Conversation, Scenario, Score

STEP = 0
"""Of the trace rows, and of the seeds of training prompts: before the first step."""
WIDTH = 100
INTERRUPTED = 130


def choose(config: Config, inputs: Inputs, split: str, n: int) -> tuple[list[Scenario], RolloutPlan]:
    """The first `n` prompts, and how they are played. Raises ValueError where there is no such split."""
    if split == "validation" and not inputs.validation:
        raise ValueError("data.validation: is null, so no prompts are held out; name a file, or play --split train")
    if split == "validation":
        scenarios, plan = inputs.validation, evaluation_plan(config.evaluation, config.run.seed)
    else:
        scenarios, plan = inputs.train, RolloutPlan.of_training(config.rollout, config.run.seed, STEP)
    return scenarios[:n], replace(plan, group_size=1, continuations=min(1, plan.continuations))


def converse(
    config: Config, inputs: Inputs, scenarios: Sequence[Scenario], plan: RolloutPlan, out: Path | None
) -> list[Group]:
    """Plays and shows one conversation per scenario, then the summary: after Ctrl-C or a fault, of what was played."""
    transformers.utils.logging.disable_progress_bar()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    rollout = build_rollout(config, inputs, device)
    if config.engine.kind == "remote":  # its server holds what was pushed last
        model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=getattr(torch, config.model.dtype))
        push_weights(iter(stored_weights(model, model.state_dict()).items()), rollout.engine.engine)
    groups: list[Group] = []

    def show(group: Group) -> None:
        groups.append(group)
        say("\n".join(describe(group, config.rewards.weights)))

    say(f"playing {len(scenarios)} conversations ...")
    with asyncio.Runner() as runner:
        try:
            runner.run(play(rollout, lambda: build_scorer(config, inputs), scenarios, plan, show))
        finally:
            for client in inputs.clients.values():
                runner.run(client.close())
            if out and groups:
                write_rows(out, [row for group in groups for row in trace_rows(group, STEP)])
            say("\n".join(summary(config, inputs, groups, rollout.engine.num_tokens)))
    rollout.engine.close()
    return groups


async def play(
    rollout: Rollout,
    new_scorer: Callable[[], Scorer],
    scenarios: Sequence[Scenario],
    plan: RolloutPlan,
    show: Callable[[Group], None],
) -> None:
    """Plays all at once; `show` gets them in their order, each as soon as it and those before it are judged."""
    async with asyncio.TaskGroup() as tasks:
        played = [
            tasks.create_task(play_and_score(rollout, new_scorer(), [(position, scenario)], plan))
            for position, scenario in enumerate(scenarios)
        ]
        for task in played:
            for group in await task:
                show(group)


def describe(group: Group, weights: dict[str, float]) -> Iterator[str]:
    """The lines that show a group of one conversation to a person."""
    [[talk]], [[score]], [reward] = group.conversations_GC, group.scores_GC, group.rewards_G
    scenario = group.scenario
    yield from ("", f"── {printable(scenario.scenario_id)} ".ljust(WIDTH, "─"))
    yield f"task: {printable(scenario.task_desc) or '(none)'}"
    yield from _block("goal, hidden from the assistant", scenario.goal)
    replies = iter(talk.replies)
    for number, message in enumerate(talk.messages):
        title = message["role"]
        if number >= talk.num_prompt_messages and title == "assistant":
            reply = next(replies)
            title += f", {len(reply.token_ids)} tokens" + (", cut" if reply.cut else "")
            if reply.thought:
                yield from _block("assistant's thought, not said", reply.thought.strip())
        yield from _block(title, message["content"])
    if talk.farewell is not None:
        yield from _block("user's goodbye, not judged", talk.farewell)
    yield f"ended: {talk.ended}"
    yield from _judgement(talk, score, reward, weights)


def _judgement(talk: Conversation, score: Score, reward: ReplyReward, weights: dict[str, float]) -> Iterator[str]:
    yield f"reward: {reward.total:.3f}" if reward.valid else "reward: none, it takes no part in training"
    if not reward.means and not score.failures:
        yield "  the first reply was cut by its token limit (rewards.truncated)"
    for name in reward.means:
        clamped = f", clamped to {reward.clamped[name]:.3f}" if reward.clamped[name] != reward.weighted[name] else ""
        yield f"  {name:<14} {reward.means[name]:.3f} x {weights[name]:g} = {reward.weighted[name]:.3f}{clamped}"
    if reward.overlong:
        yield f"  {'overlong':<14} -{reward.overlong:.3f}"
    for name, reason in score.failures.items():
        yield f"  {name} failed: {printable(reason)}"
    for name, note in score.notes.items():
        if isinstance(note, str):
            if note != talk.replies[-1].text:  # that a document is the last reply needs no second showing
                yield from _block(f"  {name}", note)
        else:
            value = f"{note:.3f}" if isinstance(note, float) else json.dumps(note, ensure_ascii=False)
            yield f"  {name}: {printable(value)}"


def _block(title: str, text: str) -> Iterator[str]:
    """Indented whole, so that no text can pass for another part of the conversation."""
    yield f"{title}:"
    yield indent(printable(text) or "(nothing)", "    ", lambda line: True)


def summary(config: Config, inputs: Inputs, groups: Sequence[Group], num_tokens: int) -> Iterator[str]:
    """`num_tokens` is what the policy sampled."""
    yield from ("", "── summary ".ljust(WIDTH, "─"))
    endings = Counter(talk.ended for group in groups for talk in group.conversations)
    yield f"conversations: {len(groups)}" + "".join(f", {count} {ended}" for ended, count in endings.most_common())
    if groups:
        rows = [row for group in groups for row in trace_rows(group, STEP)]
        for name, value in conversation_metrics(rows, config.rewards.weights).items():
            if not name.startswith("conversation/ended/"):  # told above
                yield f"  {name:<26} {value:.3f}"
    yield f"policy: {num_tokens} tokens sampled"
    for role, client in inputs.clients.items():
        counts = client.counts
        failures = ", ".join(f"{kind} {number}" for kind, number in counts.failures.items())
        yield (
            f"{role}: {counts.calls} questions, {counts.retries} asked again, {sum(counts.failures.values())} failed"
            f"{f' ({failures})' if failures else ''}; {counts.prompt_tokens} tokens read, "
            f"{counts.completion_tokens} written"
        )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = settings_parser("python -m launch.converse", (__doc__ or "").split("\n\n")[0])
    parser.add_argument("--n", type=int, default=8, metavar="N", help="play the first N prompts [%(default)s]")
    parser.add_argument("--split", choices=("train", "validation"), default="train", help="of these [%(default)s]")
    parser.add_argument("--out", type=user_path, metavar="FILE", help="new JSONL file; the rows as in a run's traces/")
    options = parser.parse_intermixed_args(arguments)
    if options.n < 1:
        parser.error(f"--n: {options.n} will not do; play at least 1")
    return options


def main() -> None:
    options = parse()
    sys.stdout.reconfigure(errors="backslashreplace")  # what the terminal's encoding lacks
    try:
        config = load_config(options.config, options.overrides)
        inputs = read_inputs(config)
        check_own_gpu(config, trains=False)
        scenarios, plan = choose(config, inputs, options.split, options.n)
        if options.out:
            check_new(options.out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    try:
        groups = converse(config, inputs, scenarios, plan, options.out)
    except KeyboardInterrupt:
        end_process(INTERRUPTED)
    except BrokenPipeError:  # of the summary, whatever went before
        drop_output()
        end_process(1)
    except Exception as error:
        fail(error)
    failures = [failure for group in groups for failure in group.failures]
    if len(failures) == len(groups):
        servers = "the servers of rollout.user and rewards.judge, their max_tokens and their timeout_s"
        print(f"error: no conversation could be judged ({failures[0]}); check {servers}", file=sys.stderr)
        end_process(1)
    end_process()


def check_new(file: Path) -> None:
    """Raises ValueError where `file` exists, or cannot be written."""
    try:
        file.touch(exist_ok=False)
        file.unlink()
    except OSError as error:
        raise ValueError(f"--out: {file} cannot be written ({error.strerror}); name a new file") from error


if __name__ == "__main__":
    main()
