"""Talks to a trained model, or to any Hugging Face folder, in the terminal.

    python -m launch.chat --model runs/NAME/model [--system FILE|TEXT] [--temperature 0.7] [--max-reply-tokens 512]

Each line typed is a message, and replies appear as they are written. Through a pipe, each line of the input is a
message too, and standard output holds the replies alone. Sampling is that of rollouts: the model's whole distribution,
tempered; the top-k and top-p of its generation config do not apply.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
import transformers
from jinja2 import TemplateError
from transformers import AutoModelForCausalLM, DynamicCache

from launch.terminal import drop_output, printable
from rollout.chat import Chat
from rollout.cores import mind_neighbours, take_cores
from rollout.gpus import check_seen
from rollout.model_folder import read_model
from rollout.settings import user_path
from rollout.thoughts import may_open, never_ends
from rollout.types import Message, Reply

COMMANDS = """\
/reset               forget the conversation
/undo                take back your last message and its reply
/system [FILE|TEXT]  show the system prompt, or set it from the next reply on
/save FILE           write the conversation to a new JSON file
/quit                end, as Ctrl-D does; Ctrl-C stops the reply that is being written
A space before a slash makes the line a message."""
INTERRUPTED = 130


class Model:
    """The causal language model of a folder, in the precision it was saved in, on the GPU where there is one."""

    def __init__(self, folder: Path, stop_ids: Sequence[int]):
        """Raises ValueError where it cannot be loaded."""
        transformers.utils.logging.disable_progress_bar()
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self._device.type == "cpu":
            mind_neighbours()
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(self._device)
        except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: shapes that differ, memory that is short
            raise ValueError(f"--model: {folder} cannot be loaded ({error})") from error
        self._model = model.eval()
        self._stop_ids = frozenset(stop_ids)
        self.max_context_tokens: int = getattr(model.config.get_text_config(), "max_position_embeddings", sys.maxsize)

    @torch.inference_mode()
    def stream(self, prompt_ids: Sequence[int], max_tokens: int, temperature: float) -> Iterator[int]:
        """The tokens of a reply as they are sampled, at most `max_tokens`, without the one that ends it."""
        ids_1L = torch.tensor([prompt_ids], device=self._device)
        cache = DynamicCache(config=self._model.config)
        for _ in range(max_tokens):
            take_cores()
            logits_V = self._model(input_ids=ids_1L, past_key_values=cache, logits_to_keep=1).logits[0, -1].float()
            if temperature == 0:
                token_1 = logits_V.argmax(keepdim=True)
            else:
                token_1 = torch.multinomial((logits_V / temperature).softmax(-1), 1)
            if token_1.item() in self._stop_ids:
                return
            yield token_1.item()
            ids_1L = token_1[None]


def pieces(chat: Chat, token_ids: Iterable[int]) -> Iterator[str]:
    """What each token of a reply adds to what it says: nothing, where it ends within a character or a thought."""
    so_far: list[int] = []
    given = ""
    for token in token_ids:
        so_far.append(token)
        _, said = chat.read(so_far, ended=False)
        whole = given if said.endswith("\ufffd") or may_open(said) else said
        yield whole[len(given) :]
        given = whole


def _kept(token_ids: Iterable[int], seen: list[int]) -> Iterator[int]:
    for token in token_ids:
        seen.append(token)
        yield token


class Session:
    """A conversation in a terminal."""

    def __init__(self, model: Model, chat: Chat, system: str, *, temperature: float, max_reply_tokens: int):
        """`system` may be empty. Raises ValueError where the chat template takes no system prompt."""
        self._model = model
        self._chat = chat
        self._temperature = temperature
        self._max_reply_tokens = max_reply_tokens
        self._exchanges: list[tuple[Message, Reply]] = []
        self._set_system(system)

    @property
    def messages(self) -> list[Message]:
        return self._messages(lambda reply: {"role": "assistant", "content": reply.text})

    def _messages(self, message_of: Callable[[Reply], Message]) -> list[Message]:
        said = [message for question, reply in self._exchanges for message in (question, message_of(reply))]
        return [{"role": "system", "content": self.system}, *said] if self.system else said

    def say(self, text: str) -> None:
        """Writes the reply to standard output as it comes, and remembers it. Ctrl-C ends it where it is."""
        question = {"role": "user", "content": text}
        prompt_ids = self._chat.prompt_ids([*self._messages(self._chat.as_sampled), question])
        context = self._model.max_context_tokens
        room = context - len(prompt_ids)
        if room < 1:
            tell(f"[not asked: the context of {context} tokens is full; /undo or /reset makes room]")
            return
        limit = min(room, self._max_reply_tokens)
        token_ids: list[int] = []
        shown, stopped = "", False
        try:
            for piece in pieces(self._chat, _kept(self._model.stream(prompt_ids, limit, self._temperature), token_ids)):
                shown += piece
                print(printable(piece), end="", flush=True)
        except KeyboardInterrupt:
            stopped = True
        thought, said = self._chat.read(token_ids)
        said = said.rstrip("\ufffd")
        print(printable(said[len(shown) :]), flush=True)  # what might have been half a mark, and was none
        if stopped and not said:
            tell("[stopped before the first word; your message is forgotten]")
            return
        if never_ends(thought):
            tell(f"[it thought for {len(token_ids)} tokens and said nothing; your message is forgotten]")
            return
        self._exchanges.append((question, Reply(tuple(prompt_ids), tuple(token_ids), (), said, "stop", thought)))
        if stopped:
            tell("[stopped]")
        elif len(token_ids) == room:
            tell(f"[cut: the context of {context} tokens is full; /undo or /reset makes room]")
        elif len(token_ids) == limit:
            tell(f"[cut at {limit} tokens, the limit that --max-reply-tokens sets]")

    def obey(self, line: str) -> bool:
        """Does what a line with a command says; false where it ends the chat."""
        command, _, argument = line.strip().partition(" ")
        if command == "/quit":
            return False
        if command == "/reset":
            self._exchanges.clear()
            tell("[forgotten]")
        elif command == "/undo":
            tell(
                f"[taken back: {self._exchanges.pop()[0]['content']}]" if self._exchanges else "[nothing to take back]"
            )
        elif command == "/system":
            self._change_system(argument.strip())
        elif command == "/save":
            self._save(argument.strip())
        else:
            tell(f"[{command} is no command]\n{COMMANDS}")
        return True

    def _change_system(self, value: str) -> None:
        try:
            if value:
                self._set_system(text_or_file(value))
        except ValueError as error:
            tell(f"[{error}]")
        else:
            tell(f"[system prompt: {self.system or 'none'}]")

    def _set_system(self, text: str) -> None:
        try:
            self._chat.prompt_ids([{"role": "system", "content": text}, {"role": "user", "content": ""}][not text :])
        except TemplateError as error:
            raise ValueError(f"the chat template of this model takes no system prompt ({error})") from error
        self.system = text

    def _save(self, name: str) -> None:
        written = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=2) + "\n"
        try:
            with open(os.path.expanduser(name), "x", encoding="utf-8", errors="backslashreplace") as file:
                file.write(written)
        except OSError as error:
            tell(f"[{name or '/save'} cannot be written ({error.strerror}); name a new file]")
        else:
            tell(f"[{len(self.messages)} messages written to {name}]")


def text_or_file(value: str) -> str:
    """What the file `value` holds, or `value` itself. Raises ValueError where it can only be a file, and is none."""
    if os.path.isfile(user_path(value)):
        try:
            return user_path(value).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{value} cannot be read ({error})") from error
    if value.endswith((".txt", ".md")) or (os.sep in value and not any(map(str.isspace, value))):
        raise ValueError(f"there is no file {value}")
    return value


def run_system_prompt(folder: Path) -> tuple[str, str]:
    """The system prompt of the run that a model's folder lies in, "" where there is none, and where it stands.

    Raises ValueError where its file cannot be read.
    """
    for run in folder.resolve().parents[:2]:  # runs/NAME/model, runs/NAME/checkpoints/step_00010
        file = run / "system_prompt.txt"
        if file.is_file() and (run / "config.yaml").is_file():
            try:
                return file.read_text(encoding="utf-8"), f" (of {file})"
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"{file} cannot be read ({error}); give the system prompt in --system") from error
    return "", ""


def tell(text: str) -> None:
    """Tells the person something that no model said."""
    print(printable(text), file=sys.stderr, flush=True)


def lines() -> Iterator[str]:
    """The lines of standard input, with a prompt and editing at a terminal."""
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # input() edits lines and remembers them once it is there
    while True:
        try:
            yield input("you> " if at_terminal else "")
        except EOFError:
            if at_terminal:
                tell("")  # what comes next begins on a line of its own
            return
        except KeyboardInterrupt:
            if not at_terminal:
                raise
            tell("\n[Ctrl-D or /quit ends the chat]")


def start(options: argparse.Namespace) -> Session:
    """Raises ValueError where the model or the system prompt will not do."""
    try:
        chat = Chat.load(options.model)
        folder = read_model(options.model)
        chat.fit_embeddings(folder.num_embeddings, options.model)
    except ValueError as error:  # the trainer's word for it is model.path
        raise ValueError(str(error).replace("model.path", "--model", 1)) from error
    if options.system is None:
        system, origin = run_system_prompt(options.model)
    else:
        system, origin = text_or_file(options.system), ""
    tell("loading the model ...")
    model = Model(options.model, chat.stop_ids)
    session = Session(model, chat, system, temperature=options.temperature, max_reply_tokens=options.max_reply_tokens)
    tell(f"replies end with: {chat.ends_note}")
    tell(f"system prompt{origin}: {system or 'none'}")
    return session


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m launch.chat",
        description=__doc__,
        epilog=f"in the chat:\n{COMMANDS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=user_path, required=True, metavar="FOLDER", help="Hugging Face model folder")
    parser.add_argument("--system", metavar="FILE|TEXT", help="system prompt [the run's, where FOLDER lies in one]")
    parser.add_argument("--temperature", type=float, default=0.7, help="0: the most likely token [%(default)s]")
    parser.add_argument("--max-reply-tokens", type=int, default=512, metavar="N", help="longest reply [%(default)s]")
    options = parser.parse_args(arguments)
    if not (options.temperature >= 0 and math.isfinite(options.temperature)):
        parser.error(f"--temperature: {options.temperature} will not do; take 0 or more")
    if options.max_reply_tokens < 1:
        parser.error(f"--max-reply-tokens: {options.max_reply_tokens} will not do; take 1 or more")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    try:
        check_seen()
        session = start(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.stdin.reconfigure(errors="replace")
    sys.stdout.reconfigure(errors="backslashreplace")
    if sys.stdin.isatty():
        tell(COMMANDS)
    try:
        for line in lines():
            if line.startswith("/"):
                if not session.obey(line):
                    break
            elif line.strip():
                session.say(line.strip())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        drop_output()
        sys.exit(1)


if __name__ == "__main__":
    main()
