"""A chat in the terminal: whole characters as they come, commands, and Ctrl-C that ends a reply but not the chat."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import sys

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from launch import chat as command
from launch.chat import Model, Session, pieces, run_system_prompt, text_or_file
from rollout.chat import Chat
from rollout.engines.interface import SampleRequest
from tests.test_templates import ids_of
from tests.test_thoughts import ASKS, OPENS, PLAIN, chat_with
from tests.tiny import TEMPLATE, make_engine, make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def piped(folder, monkeypatch, capsys):
    """Runs the command with lines on standard input; what it wrote to standard output and to standard error."""

    def run(*lines, **options):
        options = {"model": folder, "temperature": 0, "max-reply-tokens": 12} | options
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(lines).encode())))
        command.main([text for name, value in options.items() for text in (f"--{name}", str(value))])
        return capsys.readouterr()

    return run


def greedy_reply(folder, messages, max_tokens=12):
    """What the rollouts' engine says: an independent way to the same tokens."""
    chat, engine = make_engine(folder)
    request = SampleRequest(tuple(chat.prompt_ids(messages)), max_tokens, 0.0, 1)
    sampled = asyncio.run(engine.sample(request))
    engine.close()
    return chat.read(sampled.token_ids)[1]


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_a_pipe_is_answered_line_by_line_with_what_the_rollouts_would_say(folder, piped):
    output = piped("hello", "", "  ", "what about bees", system="help")
    system = {"role": "system", "content": "help"}
    first = greedy_reply(folder, [system, user("hello")])
    second = greedy_reply(folder, [system, user("hello"), assistant(first), user("what about bees")])
    assert output.out == f"{first}\n{second}\n"
    assert "system prompt: help" in output.err


def test_no_line_after_quit_is_asked(folder, piped):
    assert piped("hello", "/quit", "what").out.count("\n") == 1


def test_no_character_is_shown_before_its_last_byte():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    chat = Chat(PreTrainedTokenizerFast(tokenizer_object=tokenizer), [0])
    text = "Größe 🐝 ありがとう 👩‍🚀"
    token_ids = chat.tokenizer(f"  {text}")["input_ids"]
    given = [*pieces(chat, token_ids)]
    assert len(token_ids) == len(given) == len(text.encode()) + 2  # a token, and a piece, for every byte
    assert "".join(given) == text
    assert "🐝" in given and "\ufffd" not in "".join(given)
    assert "".join(pieces(chat, token_ids[:-1])) == text[:-1]  # cut within a character: it is left out


def test_ctrl_c_ends_the_reply_and_keeps_the_chat(folder, monkeypatch, capsys):
    session = new_session(folder)

    class Impatient(io.StringIO):
        patient = True

        def write(self, text):
            super().write(text)
            if self.patient and self.getvalue().count(" ") == 2:
                self.patient = False
                signal.raise_signal(signal.SIGINT)

    written = Impatient()
    monkeypatch.setattr(sys, "stdout", written)
    session.say("hello")
    monkeypatch.undo()
    assert session.messages == [user("hello"), assistant(written.getvalue().strip())]
    assert len(written.getvalue().split()) < 12
    assert "[stopped]" in capsys.readouterr().err
    session.say("what")
    assert len(session.messages) == 4


def test_ctrl_c_before_the_first_word_forgets_the_message(folder, capsys):
    class Slow(Model):
        def stream(self, *arguments):
            signal.raise_signal(signal.SIGINT)
            yield from super().stream(*arguments)

    chat = Chat.load(folder)
    session = Session(Slow(folder, chat.stop_ids), chat, "", temperature=0, max_reply_tokens=12)
    session.say("hello")
    assert session.messages == [] and "your message is forgotten" in capsys.readouterr().err


def test_a_full_context_is_told_and_the_chat_goes_on(folder, piped):
    output = piped("bees " * 600, "hello")
    assert "[not asked: the context of 512 tokens is full; /undo or /reset makes room]" in output.err
    assert output.out == greedy_reply(folder, [user("hello")]) + "\n"
    nearly_full = "bees " * 506  # with <user>, <end> and <assistant>, three tokens are left of 512
    assert "[cut: the context of 512 tokens is full" in piped(nearly_full.strip()).err


def test_a_reply_that_reaches_its_limit_says_so(piped):
    output = piped("hello", **{"max-reply-tokens": 2})
    assert len(output.out.split()) == 2 and "[cut at 2 tokens, the limit that --max-reply-tokens sets]" in output.err


def test_undo_takes_back_an_exchange_and_reset_all_of_them(folder, capsys):
    session = new_session(folder, system="help")
    session.say("hello")
    before = session.messages
    session.say("what")
    assert session.obey("/undo") and session.messages == before
    assert session.obey("/reset") and session.messages == before[:1]
    assert session.obey("/undo") and "[nothing to take back]" in capsys.readouterr().err


def test_the_system_prompt_can_be_seen_and_changed(folder, piped, tmp_path):
    (tmp_path / "prompt.txt").write_text("you help\n")
    output = piped("/system", f"/system {tmp_path}/prompt.txt", "/system gone.txt", "/system", "hello")
    said = [line for line in output.err.splitlines() if line.startswith("[")]
    assert said[:4] == [
        "[system prompt: none]",
        "[system prompt: you help]",
        "[there is no file gone.txt]",
        "[system prompt: you help]",
    ]
    assert output.out == greedy_reply(folder, [{"role": "system", "content": "you help"}, user("hello")]) + "\n"


def test_a_conversation_is_saved_once_and_never_over_another_file(piped, tmp_path):
    file = tmp_path / "talk.json"
    output = piped("hello", f"/save {file}", f"/save {file}", "/save")
    assert json.loads(file.read_text())["messages"] == [user("hello"), assistant(output.out.strip())]
    assert f"[2 messages written to {file}]" in output.err and "(File exists); name a new file]" in output.err
    assert "[/save cannot be written" in output.err


def test_an_unknown_command_is_told_and_a_space_makes_it_a_message(piped):
    output = piped("/nope")
    assert output.out == "" and "[/nope is no command]" in output.err and "/undo" in output.err
    assert len(piped(" /nope").out.split()) > 0


def test_control_characters_of_a_model_never_reach_the_terminal(folder, capsys):
    chat = Chat.load(folder)
    chat.tokenizer.decode = lambda ids, **_: "\x1b[2J\x07 bell" * len(ids)  # the tiny vocabulary is harmless
    Session(Model(folder, chat.stop_ids), chat, "", temperature=0, max_reply_tokens=12).say("hello")
    output = capsys.readouterr().out
    assert "\x1b" not in output and "\x07" not in output and r"\x1b[2J\x07 bell" in output


def test_a_model_in_a_run_is_talked_to_with_the_runs_system_prompt(tmp_path):
    run = tmp_path / "runs" / "one"
    (run / "checkpoints" / "step_00010").mkdir(parents=True)
    assert run_system_prompt(run / "model") == ("", "")
    (run / "system_prompt.txt").write_text("be kind")
    assert run_system_prompt(run / "model") == ("", "")  # of something else than a run
    (run / "config.yaml").touch()
    for model in (run / "model", run / "checkpoints" / "step_00010"):
        assert run_system_prompt(model) == ("be kind", f" (of {run}/system_prompt.txt)")
    (run / "system_prompt.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="(?s)system_prompt.txt cannot be read .*give the system prompt in --system"):
        run_system_prompt(run / "model")


def test_a_system_prompt_that_looks_like_a_file_must_be_one(tmp_path):
    assert text_or_file("Answer yes/no questions only.") == "Answer yes/no questions only."
    assert text_or_file("") == ""
    for path in ("prompts/gone", "gone.md"):
        with pytest.raises(ValueError, match=f"there is no file {path}"):
            text_or_file(path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="binary cannot be read"):
        text_or_file(str(tmp_path / "binary"))


def test_a_template_without_system_prompts_is_told_before_the_first_message(tmp_path, capsys, monkeypatch):
    folder = make_model(tmp_path / "model")
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE
    (folder / "chat_template.jinja").write_text(refusing)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    with pytest.raises(SystemExit) as end:
        command.main(["--model", str(folder), "--system", "help"])
    assert end.value.code == 2
    assert "takes no system prompt (no system role)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "models/gone"], "--model: there is no folder models/gone"),
        (["--model", "configs"], "--model: configs is not a Hugging Face model folder: it lacks config.json"),
        (["--model", "configs", "--temperature", "nan"], "--temperature: nan will not do"),
        (["--model", "configs", "--max-reply-tokens", "0"], "--max-reply-tokens: 0 will not do"),
    ],
)
def test_bad_arguments_are_told(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        command.main(arguments)
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_weights_that_do_not_fit_the_config_are_told(tmp_path):
    folder = make_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    with pytest.raises(ValueError, match="--model: .* cannot be loaded"):
        Model(folder, [1])


def new_session(folder, system=""):
    chat = Chat.load(folder)
    return Session(Model(folder, chat.stop_ids), chat, system, temperature=0, max_reply_tokens=12)


class Saying:
    """A model that says what it is told to, and remembers what it was asked."""

    max_context_tokens = 512

    def __init__(self, chat, *texts):
        self.asked = []
        self._replies = iter([ids_of(chat, text) for text in texts])

    def stream(self, prompt_ids, max_tokens, temperature):
        self.asked.append(list(prompt_ids))
        yield from next(self._replies)


def test_what_the_model_thinks_is_neither_shown_nor_part_of_the_conversation(capsys):
    chat = chat_with(OPENS)
    model = Saying(chat, ASKS, "Hm.</think>The end.", "Well, well", "Hm.</think><b", "Hm.</think>Yes.")
    session = Session(model, chat, "", temperature=0, max_reply_tokens=200)
    for text, shown in (
        ("Hi.", "Here is your text.\n"),
        ("And then?", "The end.\n"),
        ("Go on.", "\n"),  # it never leaves its thought
        ("Go on.", "<b\n"),  # half a mark, as it seemed, and none
    ):
        session.say(text)
        assert capsys.readouterr().out == shown
    said = [message["content"] for message in session.messages]
    assert said == ["Hi.", "Here is your text.", "And then?", "The end.", "Go on.", "<b"]
    session.say("Bye.")
    assert model.asked[-1] == chat.prompt_ids([*session.messages[:6], user("Bye.")])  # the template drops thoughts


def test_a_thought_without_end_is_told(capsys):
    chat = chat_with(PLAIN)
    session = Session(Saying(chat, "<think>Hm, hm"), chat, "", temperature=0, max_reply_tokens=200)
    session.say("Hi.")
    assert "said nothing; your message is forgotten" in capsys.readouterr().err and session.messages == []
