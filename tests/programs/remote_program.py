"""Ranks that share a policy server: who pushes, and do all see it?

torchrun --nproc_per_node N -m tests.programs.remote_program SERVER MODEL NEW_MODEL FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from grpo.ranks import Ranks, end_process
from grpo.sync import push_weights
from rollout.engine_remote import RemoteEngine
from rollout.settings import EngineSettings
from tests.test_engine_remote import Model


def main() -> None:
    address, model, new_model, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    ranks = Ranks.join()
    own_folder = folder / f"rank-{ranks.rank}"
    settings = EngineSettings(kind="remote", base_url=address, weights_folder=own_folder, max_context_tokens=256)
    engine = RemoteEngine(settings, model, torch.float32, ranks.device, stop_ids=(1,))
    push_weights(
        Model(AutoModelForCausalLM.from_pretrained(new_model)), engine
    )  # compares the fingerprint on each rank
    shares = ranks.gather((own_folder.exists(), own_folder.exists() and [*own_folder.iterdir()]))
    assert shares == [(True, [])] + [(False, False)] * (ranks.world_size - 1), shares
    engine.close()
    ranks.leave()
    end_process()


if __name__ == "__main__":
    main()
