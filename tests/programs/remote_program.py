"""Ranks that share a policy server: who pushes, and do all see it?

torchrun --nproc_per_node N -m tests.programs.remote_program SERVER MODEL NEW_MODEL FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors.torch import load_file

from grpo.ranks import Ranks, end_process
from rollout.engines.interface import weight_mark
from rollout.engines.remote import RemoteEngine
from rollout.settings import EngineSettings

NAME = "model.layers.1.mlp.down_proj.weight"


def main() -> None:
    address, model, new_model, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    ranks = Ranks.join()
    own_folder = folder / f"rank-{ranks.rank}"
    if ranks.is_main:  # the others never write
        own_folder.mkdir()
    settings = EngineSettings(kind="remote", base_url=address, weights_folder=own_folder, max_context_tokens=256)
    engine = RemoteEngine(settings, stop_ids=(1,))
    for pushed in (model, new_model):
        weights = load_file(pushed / "model.safetensors")
        left = iter(weights.items())
        engine.push_weights(left)
        assert next(left, None) is None  # gathering is collective, so every rank goes to the end
        held = {round(mark, 6) for names, mark in engine.fingerprint() if names == (NAME,)}
        assert held == {round(weight_mark(weights[NAME]), 6)}, held
        ranks.gather(None)  # the next push must not come before everybody has looked
    shares = ranks.gather(own_folder.exists())
    assert shares == [True] + [False] * (ranks.world_size - 1), shares
    engine.close()
    ranks.leave()
    end_process()


if __name__ == "__main__":
    main()
