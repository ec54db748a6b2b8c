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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy
import torch
import transformers

from grpo.background import LoopThread
from grpo.config import Config
from grpo.config_file import describe_settings, load_config
from grpo.ranks import Ranks, end_process
from grpo.recorder import RunFolder
from grpo.room import check_own_gpu
from grpo.stopping import Stop
from rewards.judge import Judge
from rewards.scoring import Scorer
from rollout import engine_vllm
from rollout.chat import Chat, check_context
from rollout.conversation import Rollout, User
from rollout.cores import mind_neighbours
from rollout.data import fit_prompts, read_scenarios, steps_per_epoch, with_system_prompt
from rollout.engine import SharedEngine, build_engine, choose_engine
from rollout.gpus import GPUFault, check_seen
from rollout.llm_client import LLMClient
from rollout.policy_server import check_server
from rollout.prompting import system_prompt
from rollout.role_check import SAMPLE_REPLY, check_role
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
    """Reads and checks all that a run needs, its folder first. Raises ValueError naming file, row or key, and the
    remedy."""
    files = [config.model.path, config.data.train, *filter(None, [config.data.validation])]
    if is_main():
        RunFolder(config).check_free(config.run.overwrite, files)
    inputs = read_inputs(config)
    if config.deepspeed.extra:
        from grpo.policy import check_extra  # imports DeepSpeed: seconds

        check_extra(config.model, config.optimizer, config.deepspeed)
    check_own_gpu(config, trains=True)
    say(
        f"{inputs.total_steps} steps of {config.rollout.prompts_per_step} prompts x {config.rollout.group_size} replies"
    )
    return inputs


def read_inputs(config: Config) -> Inputs:
    """As `check_inputs`, of all but the run's folder, for commands that leave none."""
    check_seen()
    for note in config.without_effect():
        say(f"note: {note}")
    engine, reason = choose_engine(config.engine)
    sleeps = config.engine.sleep and engine == "vllm" and torch.cuda.is_available()
    if config.rollout.overlap == "one_step" and sleeps:
        raise ValueError(
            "rollout.overlap: one_step samples during the update, when the engine would sleep; set engine.sleep=false "
            "(and engine.gpu_memory_utilization to what the update leaves), or rollout.overlap=none"
        )
    chat = Chat.load(config.model.path)
    check_context(config.model.path, config.engine.max_context_tokens)
    if engine == "remote" and is_main():
        check_server(config.engine, config.model.path, config.model.dtype)
    if engine == "vllm" and config.engine.extra:
        engine_vllm.check_extra(config.engine, config.model.path, getattr(torch, config.model.dtype))
    elif engine == "transformers" and config.engine.extra:
        say("note: engine.extra has no effect: it is for vLLM, and the engine is transformers")
    need_reference = "bleu_score" in config.rewards.weights
    system = system_prompt(config.rollout.system_prompt) if config.rollout.system_prompt else None

    def scenarios(path: Path) -> tuple[list[Scenario], int]:
        rows = read_scenarios(path, need_reference=need_reference, user=config.rollout.user.kind)
        if system is not None:
            if own := sum(len(row.system) for row in rows):
                say(f"note: {path}: rollout.system_prompt takes the place of the system messages of {own} prompts")
            rows = with_system_prompt(rows, system)
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
    config.check_micro_batch(longest)
    per_epoch = steps_per_epoch(len(train), config.rollout.prompts_per_step)
    total_steps = config.run.steps or config.run.epochs * per_epoch
    if config.rollout.dynamic_sampling.max_rounds and len(train) == config.rollout.prompts_per_step:
        say("note: rollout.dynamic_sampling has no effect: every prompt is in every step, none is left to refill with")

    clients = {}
    if config.rollout.user.kind == "llm":
        clients["user"] = LLMClient("user", config.rollout.user.endpoint)
    if config.rewards.needs_judge:
        clients["judge"] = LLMClient("judge", config.rewards.judge)
    user = LLMUser(clients["user"], config.rollout.user) if "user" in clients else ScriptedUser()
    judge = Judge(clients["judge"], config.rewards) if "judge" in clients else None
    if is_main():
        check_roles(clients, user, judge, train[0])
    say(f"engine: {engine} ({reason})")
    if config.rollout.train_on == "all_replies":
        say(f"trained: all replies, {chat.history_note}")
    return Inputs(chat, train, validation, clients, user, judge, total_steps)


def check_roles(clients: Mapping[str, LLMClient], user: User, judge: Judge | None, scenario: Scenario) -> None:
    """Each server is asked one question as the run asks them. Raises ValueError, with the remedy, where it cannot play."""
    chat = [*scenario.messages, {"role": "assistant", "content": SAMPLE_REPLY}]
    for role, client in clients.items():
        asked = (user if role == "user" else judge).question(scenario, chat)
        for note in check_role(role, client.settings, asked):
            say(note)


def build_rollout(config: Config, inputs: Inputs, device: torch.device) -> Rollout:
    """Starts the engine; its first weights are those of `model.path`."""
    say("starting the engine ...")
    if device.type == "cpu":
        mind_neighbours(torch.get_num_threads())
    dtype = getattr(torch, config.model.dtype)
    engine = build_engine(config.engine, config.model.path, dtype, device, inputs.chat.stop_ids)
    return Rollout(config.rollout, SharedEngine(engine), inputs.chat, inputs.user)


def build_scorer(config: Config, inputs: Inputs) -> Scorer:
    return Scorer(config.rewards, inputs.chat, inputs.judge, max_reply_tokens=config.rollout.max_reply_tokens)


def run_training(config: Config, inputs: Inputs) -> Stop | None:
    """Loads the models and trains, on this rank. What it returns says why training ended before its last step."""
    # Here, because they import DeepSpeed: seconds, which bad input and conversations without training do without.
    from grpo.policy import Policy, Reference
    from grpo.trainer import Parts, Trainer

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
    rollout = build_rollout(config, inputs, ranks.device)
    with LoopThread() as runner:
        try:
            scorer = build_scorer(config, inputs)
            parts = Parts(policy, reference, rollout, scorer, inputs.clients, inputs.train, inputs.validation)
            stop = Trainer(config, parts, inputs.total_steps, ranks, runner).train()
        finally:
            for client in inputs.clients.values():
                runner.run(client.close())
    rollout.engine.close()
    ranks.leave()
    return stop


def is_main() -> bool:
    """Whether this is the first of the processes that torchrun started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """Tells the person at the terminal, once."""
    if is_main():
        print(text, flush=True)


def settings_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """Takes `--config FILE` and the `overrides` that `load_config` applies; its help lists every setting."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
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
    return parser


def parse(arguments: list[str] | None = None) -> Config:
    options = settings_parser("python -m launch.train", (__doc__ or "").split("\n\n")[0]).parse_args(arguments)
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
        if is_main() or isinstance(error, GPUFault):
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    try:
        stop = run_training(config, inputs)
    except KeyboardInterrupt:  # before training, or after it has saved everything
        end_process(130)
    except Exception as error:
        fail(error)
    if stop and stop.exit_code:
        end_process(stop.exit_code)
    return config


def fail(error: Exception) -> NoReturn:
    """Ends the process with what went wrong after everything was checked."""
    traceback.print_exception(error)
    while isinstance(error, ExceptionGroup):  # of conversations that failed together: the first tells why
        error = error.exceptions[0]
    print(f"error: rank {os.environ.get('RANK', '0')}: {error}", file=sys.stderr)
    end_process(1)


if __name__ == "__main__":
    main()
