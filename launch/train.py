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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import numpy
import torch
import transformers

from grpo.background import LoopThread
from grpo.config import Config
from grpo.config_file import describe_settings, load_config
from grpo.model.room import check_own_gpu
from grpo.ranks import Ranks, end_process
from grpo.run.disk import check_space
from grpo.run.folder import RunFolder
from grpo.run.learning import warnings_at_start
from grpo.run.peers import Peers
from grpo.run.stopping import FAULT, Stop, StopSignals
from rewards.judge import Judge
from rewards.scoring import Scorer
from rollout.chat import Chat
from rollout.conversation import Rollout, User
from rollout.cores import mind_neighbours
from rollout.data import fit_prompts, read_scenarios, steps_per_epoch, with_system_prompt
from rollout.engines import vllm as engine_vllm
from rollout.engines.choice import build_engine, choose_engine
from rollout.engines.policy_server import check_server
from rollout.engines.sharing import SharedEngine
from rollout.gpus import GPUFault, check_seen
from rollout.model_folder import ModelFolder, check_trainable, read_model
from rollout.roles.check import SAMPLE_REPLY, check_role
from rollout.roles.client import LLMClient
from rollout.roles.prompting import system_prompt
from rollout.roles.simulator import LLMUser, ScriptedUser
from rollout.settings import user_path
from rollout.types import Scenario

LOST_PEER_S = 2.0
"""Within which a rank that the system killed is seen to be gone, after its connections broke."""


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
    folder: RunFolder | None = None
    """The run's, held by the main rank; None for commands that leave none."""


def check_inputs(config: Config) -> Inputs:
    """Takes the run's folder, then reads and checks all that a run needs.

    Raises ValueError naming file, row or key, and the remedy; the folder is as it was then.
    """
    folder = RunFolder(config.run.path)
    files = [config.model.path, config.data.train, *filter(None, [config.data.validation])]
    try:
        if is_main():
            note = folder.take()
            tell("note", note, folder.check_free(config.run.overwrite, files))
        inputs = read_inputs(config)
        if config.deepspeed.extra:
            from grpo.model.zero import check_extra  # imports DeepSpeed: seconds

            check_extra(config.model, config.optimizer, config.deepspeed)
        check_own_gpu(config, trains=True)
        if is_main():
            tell("note", check_space(config, inputs.total_steps, freed=folder.num_bytes))
            tell("warning", *warnings_at_start(config, inputs.total_steps))
    except BaseException:
        folder.release()
        raise
    say(
        f"{inputs.total_steps} steps of {config.rollout.prompts_per_step} prompts x {config.rollout.group_size} replies"
    )
    return replace(inputs, folder=folder)


def read_inputs(config: Config) -> Inputs:
    """As `check_inputs`, of all but the run's folder, for commands that leave none."""
    check_seen()
    tell("note", *config.without_effect())
    engine, reason = choose_engine(config.engine)
    sleeps = config.engine.sleep and engine == "vllm" and torch.cuda.is_available()
    if config.rollout.overlap == "one_step" and sleeps:
        raise ValueError(
            "rollout.overlap: one_step samples during the update, when the engine would sleep; set engine.sleep=false "
            "(and engine.gpu_memory_utilization to what the update leaves), or rollout.overlap=none"
        )
    chat = Chat.load(config.model.path)
    folder = read_model(config.model.path)
    check_trainable(folder, config.engine.max_context_tokens)
    if engine == "vllm" and not torch.cuda.is_available() and folder.special_layers:
        raise ValueError(
            f"engine.kind: vLLM on a CPU cannot follow the training of {folder.special_layers}, which "
            f"{config.model.path} has; set engine.kind=transformers"
        )
    for note in model_notes(folder, chat, config.rollout.train_thoughts):
        say(note)
    if engine == "remote" and is_main():
        check_server(config.engine, config.model.path, config.model.dtype)
    if engine == "vllm" and config.engine.extra:
        engine_vllm.check_extra(config.engine, config.model.path, getattr(torch, config.model.dtype))
    elif engine == "transformers" and config.engine.extra:
        say("note: engine.extra has no effect: it is for vLLM, and the engine is transformers")
    need_reference = "bleu_score" in config.rewards.weights
    system = system_prompt(config.rollout.system_prompt) if config.rollout.system_prompt else None

    def scenarios(path: Path) -> tuple[list[Scenario], int]:
        rows = read_scenarios(
            path,
            need_reference=need_reference,
            user=config.rollout.user.kind,
            tell=lambda text: say(f"note: {text}"),
        )
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
    if engine == "vllm":
        engine_vllm.check_classes(folder.model, config.model.path)
    say(f"engine: {engine} ({reason})")
    if config.rollout.train_on == "all_replies":
        say(f"trained: all replies, {chat.history_note}")
    return Inputs(chat, train, validation, clients, user, judge, total_steps)


def model_notes(folder: ModelFolder, chat: Chat, train_thoughts: bool) -> Iterator[str]:
    """What a person should know about a model and its template. Raises ValueError where they do not go together."""
    yield f"replies end with: {chat.ends_note}"
    if beyond := chat.fit_embeddings(folder.num_embeddings, folder.path):
        size = folder.num_embeddings
        yield f"note: the tokenizer has {beyond} beyond the model's {size} embeddings; nobody is let say it"
    if folder.unused:
        yield (
            f"note: {folder.path} holds {len(folder.unused)} weights that its model has no place for, such as "
            f"{folder.unused[0]}; a trained model is saved without them"
        )
    if chat.thought_opening:
        trained = "trained with the rest" if train_thoughts else "not trained"
        yield (
            f"note: the chat template opens each reply with a thought ({chat.thought_opening.strip()}), which nobody "
            f"but the policy reads and no reward counts; it is {trained} (rollout.train_thoughts)"
        )


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
        mind_neighbours()
    dtype = getattr(torch, config.model.dtype)
    engine = build_engine(config.engine, config.model.path, dtype, device, inputs.chat.stop_ids)
    return Rollout(config.rollout, SharedEngine(engine), inputs.chat, inputs.user)


def build_scorer(config: Config, inputs: Inputs) -> Scorer:
    return Scorer(config.rewards, inputs.chat, inputs.judge, max_reply_tokens=config.rollout.max_reply_tokens)


def run_training(config: Config, inputs: Inputs) -> Stop | None:
    """Loads the models and trains, on this rank, and gives the run's folder up. What it returns says why training ended
    before its last step.
    """
    with inputs.folder as folder:
        ranks = Ranks.join()
        peers = Peers.meet(ranks)
        try:
            with StopSignals(
                peers, folder, is_main=ranks.is_main, echoes="TORCHELASTIC_RUN_ID" in os.environ
            ) as signals:
                return _train(config, inputs, ranks, signals)
        except RuntimeError as error:
            if ranks.world_size > 1 and peers.tell_killed(folder.path, LOST_PEER_S):
                folder.end("a rank was killed, or crashed")
                return Stop("a rank was killed", FAULT)  # what this one met is a consequence
            folder.end(f"error: {first_of(error)}")
            raise
        except Exception as error:
            folder.end(f"error: {first_of(error)}")
            raise
        finally:
            peers.leave()


def _train(config: Config, inputs: Inputs, ranks: Ranks, signals: StopSignals) -> Stop | None:
    # Here, because they import DeepSpeed: seconds, which bad input and conversations without training do without.
    from grpo.model.policy import Policy
    from grpo.model.reference import Reference
    from grpo.trainer import Parts, Trainer

    transformers.utils.logging.disable_progress_bar()
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(config.run.seed)
    say(f"loading the model in {config.model.dtype} ...")
    policy = Policy(
        config.model,
        config.optimizer,
        config.deepspeed,
        temperature=config.rollout.temperature,
        entropy_has_gradient=config.loss.entropy_coef > 0,
        total_steps=inputs.total_steps * config.updates_per_step,
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
            trainer = Trainer(
                config, parts, inputs.total_steps, ranks, runner, folder=inputs.folder, signals=signals
            )
            stop = trainer.train()
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


def tell(kind: str, *texts: str | None) -> None:
    """A line for each text that there is."""
    for text in filter(None, texts):
        say(f"{kind}: {text}")


def settings_parser(prog: str, description: str, *, with_config: bool = True) -> argparse.ArgumentParser:
    """Takes the `overrides` that `load_config` applies and `--config FILE`; its help lists every setting."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog="settings (key, default, unit and meaning):\n" + "\n".join(describe_settings()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if with_config:
        parser.add_argument("--config", type=user_path, required=True, metavar="FILE", help="YAML file with the settings")
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
    print(f"error: rank {os.environ.get('RANK', '0')}: {first_of(error)}", file=sys.stderr)
    end_process(1)


def first_of(error: Exception) -> Exception:
    """Of conversations that failed together, the first tells why."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    main()
