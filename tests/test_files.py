"""Who may read what a run writes for others."""

from __future__ import annotations

import os
from functools import partial
from stat import S_IMODE
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.run.model_writer import ModelWriter
from rollout.engines.remote import RemoteEngine
from tests.groups import Alone
from tests.tiny import make_model


@pytest.fixture(params=[(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)], ids=["open", "group", "private"])
def mode(request):
    """What a file has under the umask that is set meanwhile."""
    umask, mode = request.param
    before = os.umask(umask)
    yield mode
    os.umask(before)


def test_a_saved_model_is_as_open_as_the_umask_has_it_every_shard_of_it(tmp_path, mode):
    source = make_model(tmp_path / "source")
    causal_lm = AutoModelForCausalLM.from_pretrained(source)
    causal_lm.save_pretrained = partial(causal_lm.save_pretrained, max_shard_size="300KB")
    policy = SimpleNamespace(ranks=Alone(0, 1, torch.device("cpu")), causal_lm=causal_lm, state_on_main=lambda: None)
    ModelWriter(policy, source).save(tmp_path / "saved")
    modes = {path.name: S_IMODE(path.stat().st_mode) for path in (tmp_path / "saved").iterdir()}
    assert sum(name.endswith(".safetensors") for name in modes) > 1 and "tokenizer.json" in modes
    assert set(modes.values()) == {mode}, modes


def test_a_model_with_several_chat_templates_is_saved_with_all_of_them(tmp_path):
    source = make_model(tmp_path / "source")
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = templates = {"default": tokenizer.chat_template, "tool_use": "{{ messages[0].content }}"}
    tokenizer.save_pretrained(source)  # the further ones in a folder of their own
    causal_lm = AutoModelForCausalLM.from_pretrained(source)
    alone = Alone(0, 1, torch.device("cpu"))
    policy = SimpleNamespace(ranks=alone, causal_lm=causal_lm, state_on_main=causal_lm.state_dict)
    ModelWriter(policy, source).save(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == templates


def test_weights_on_their_way_to_a_server_are_as_open_as_the_umask_has_it(tmp_path, mode):
    seen = []

    def call_workers(method, weights_path):
        seen.extend(S_IMODE(os.stat(os.path.join(weights_path, name)).st_mode) for name in os.listdir(weights_path))

    server = SimpleNamespace(call_workers=call_workers, post=lambda path: {"success": True})
    weights = iter([("a.weight", torch.ones(2, 2))])
    RemoteEngine._push(SimpleNamespace(_weights_folder=tmp_path, _server=server), weights)
    assert seen == [mode]
