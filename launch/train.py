"""Trains a policy.

    torchrun --nproc_per_node 8 -m launch.train --config configs/medium_qwen3_4b.yaml [section.key=value ...]
    python -m launch.train --config FILE

Everything that can be wrong with the settings, the data, the model folder and the endpoints is checked
before any model loads.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
import transformers

from grpo.background import LoopThread
from grpo.config import Config, describe_settings, load_config
from grpo.policy import Policy, Reference
from grpo.ranks import Ranks, end_process
from grpo.recorder import RunFolder
from grpo.stopping import Stop
from grpo.trainer import Parts, Trainer
from rewards.judge import Judge
from rewards.scoring import Scorer
from rollout.chat import Chat, check_context
from rollout.conversation import Rollout, User
from rollout.data import fit_prompts, read_scenarios, steps_per_epoch
from rollout.engine import SharedEngine, build_engine, choose_engine
from rollout.llm_client import LLMClient
from rollout.simulator import LLMUser, ScriptedUser
from rollout.types import Scenario


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a run needs besides models, read and checked."""

    chat: Chat
    train: list[Scenario]
    validation: list[Scenario]
    clients: dict[str, LLMClient]
    user: User
    judge: Judge | None
    total_steps: int


def check_inputs(config: Config) -> Inputs:
    """Reads and checks all that a run needs. Raises ValueError naming file, row or key, and the remedy."""
    inputs = [config.model.path, config.data.train, *filter(None, [config.data.validation])]
    if is_main():
        RunFolder(config).check_free(config.run.overwrite, inputs)
    engine, reason = choose_engine(config.engine)
    if config.rollout.overlap == "one_step" and config.engine.sleep and torch.cuda.is_available():
        raise ValueError(
            "rollout.overlap: one_step samples during the update, when the engine would sleep; set engine.sleep=false "
            "(and engine.gpu_memory_utilization to what the update leaves), or rollout.overlap=none"
        )
    chat = Chat.load(config.model.path)
    check_context(config.model.path, config.engine.max_context_tokens)
    need_reference = "bleu_score" in config.rewards.weights

    def scenarios(path: Path) -> tuple[list[Scenario], int]:
        rows = read_scenarios(path, need_reference=need_reference, user=config.rollout.user.kind)
        kept, longest = fit_prompts(rows, chat, config.data, path, config.max_prompt_tokens)
        num_dropped = len(rows) - len(kept)
        say(
            f"{path}: {len(kept)} prompts"
            + (f", {num_dropped} dropped as longer than {config.max_prompt_tokens} tokens" if num_dropped else "")
        )
        return kept, longest

    if config.data.validation and config.data.validation.resolve() == config.data.train.resolve():
        raise ValueError(f"data.validation: {config.data.validation} is the training file; hold other rows out")
    train, longest = scenarios(config.data.train)
    validation, _ = scenarios(config.data.validation) if config.data.validation else ([], 0)
    budget = config.update.max_tokens_per_micro_batch
    longest += config.rollout.max_reply_tokens
    if longest > budget:
        raise ValueError(
            f"update.max_tokens_per_micro_batch: {budget} is less than the longest prompt with its reply, "
            f"{longest} tokens; raise it, or lower data.max_prompt_tokens or rollout.max_reply_tokens"
        )
    per_epoch = steps_per_epoch(len(train), config.rollout.prompts_per_step)
    total_steps = config.run.steps or config.run.epochs * per_epoch

    clients = {}
    if config.rollout.user.kind == "llm":
        clients["user"] = LLMClient("user", config.rollout.user.endpoint)
    if config.rewards.needs_judge:
        clients["judge"] = LLMClient("judge", config.rewards.judge)
    user = LLMUser(clients["user"], config.rollout.user) if "user" in clients else ScriptedUser()
    judge = Judge(clients["judge"], config.rewards) if "judge" in clients else None
    if is_main():
        for client in clients.values():
            client.check()
    batch = f"{config.rollout.prompts_per_step} prompts x {config.rollout.group_size} replies"
    say(f"engine: {engine} ({reason}); {total_steps} steps of {batch}")
    return Inputs(chat, train, validation, clients, user, judge, total_steps)


def run_training(config: Config, inputs: Inputs) -> Stop | None:
    """Loads the models and trains, on this rank. What it returns says why training ended before its last step."""
    ranks = Ranks.join()
    transformers.utils.logging.disable_progress_bar()
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(config.run.seed)
    say("loading the model ...")
    policy = Policy(
        config.model,
        config.optimizer,
        config.deepspeed,
        temperature=config.rollout.temperature,
        entropy_has_gradient=config.loss.entropy_coef > 0,
        total_steps=inputs.total_steps * (config.rollout.prompts_per_step // config.mini_batch_prompts),
        ranks=ranks,
    )
    say(f"attention: {policy.attention.reason}")
    reference = None
    if config.rollout.overlap == "one_step":
        say("log-probs of sampler and trainer are compared in step 1 only: later steps sample from older weights")
    if config.loss.kl_coef > 0:
        reference = Reference(config.model, config.deepspeed, temperature=config.rollout.temperature, ranks=ranks)
    say("starting the engine ...")
    dtype = getattr(torch, config.model.dtype)
    engine = SharedEngine(build_engine(config.engine, config.model.path, dtype, ranks.device, inputs.chat.stop_ids))
    with LoopThread() as runner:
        try:
            rollout = Rollout(config.rollout, engine, inputs.chat, inputs.user)
            scorer = Scorer(config.rewards, inputs.chat, inputs.judge, max_reply_tokens=config.rollout.max_reply_tokens)
            parts = Parts(policy, reference, rollout, scorer, inputs.clients, inputs.train, inputs.validation)
            stop = Trainer(config, parts, inputs.total_steps, ranks, runner).train()
        finally:
            for client in inputs.clients.values():
                runner.run(client.close())
    engine.close()
    ranks.leave()
    return stop


def is_main() -> bool:
    """Whether this is the first of the processes that torchrun started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """Tells the person at the terminal, once."""
    if is_main():
        print(text, flush=True)


def parse(arguments: list[str] | None = None) -> Config:
    parser = argparse.ArgumentParser(
        prog="python -m launch.train",
        description=(__doc__ or "").split("\n\n")[0],
        epilog="settings (key, default, unit and meaning):\n" + "\n".join(describe_settings()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="YAML file with the settings")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="settings to change; a section may be a file: rewards=FILE",
    )
    options = parser.parse_args(arguments)
    return load_config(options.config, options.overrides)


def main() -> None:
    run(parse)
    end_process()


def run(read_config: Callable[[], Config]) -> Config:
    """Checks and trains, up to the last step or the end of the budget.

    Anything else ends the process: with 2 for bad input, 1 for a fault later, 130 after SIGINT and 143 after SIGTERM.
    """
    try:
        config = read_config()
        inputs = check_inputs(config)
    except ValueError as error:
        if is_main():
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    try:
        stop = run_training(config, inputs)
    except KeyboardInterrupt:  # before training, or after it has saved everything
        end_process(130)
    except Exception as error:
        traceback.print_exc()
        while isinstance(error, ExceptionGroup):  # of conversations that failed together: the first tells why
            error = error.exceptions[0]
        print(f"error: rank {os.environ.get('RANK', '0')}: {error}", file=sys.stderr)
        end_process(1)
    if stop and stop.exit_code:
        end_process(stop.exit_code)
    return config


if __name__ == "__main__":
    main()
