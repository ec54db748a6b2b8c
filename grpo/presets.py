"""Published methods as settings: each is a loss × an aggregation × a scale, and what goes with it.

`preset: dapo` in a file puts these under the file's own settings, which win; `preset=dapo` on the command
line goes over the file, as every override does. Learning rate, batch and data stay the run's own.
"""

from __future__ import annotations

from typing import Any

_PLAIN: dict[str, dict[str, Any]] = {
    "rollout": {"dynamic_sampling": {"max_rounds": 0}},
    "rewards": {"soft_overlong": {"buffer": 0.2, "penalty": 0.0}},
    "advantage": {"baseline": "mean", "scale": "group_std"},
    "loss": {
        "variant": "grpo",
        "aggregate": "token_mean",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": None,
        "kl_coef": 0.0,
        "kl_placement": "in_loss",
        "entropy_coef": 0.0,
        "correction": "none",
    },
}
"""What every preset starts from, so that nothing of an earlier method stays behind."""


def _preset(**changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {section: _PLAIN[section] | changes.get(section, {}) for section in _PLAIN}


PRESETS: dict[str, dict[str, Any]] = {
    # DeepSeekMath, arXiv:2402.03300, eq. 3 and 4 and section 4.2.
    "grpo": _preset(loss={"aggregate": "seq_mean_token_mean", "kl_coef": 0.04, "kl_estimator": "k3"}),
    # DAPO, arXiv:2503.14476, section 4.1: clip-higher, token-level loss, dynamic sampling, soft overlong penalty
    # over the last fifth of the reply, no KL.
    "dapo": _preset(
        rollout={"dynamic_sampling": {"max_rounds": 3}},
        rewards={"soft_overlong": {"buffer": 0.2, "penalty": 1.0}, "truncated": "score"},
        loss={"clip_high": 0.28},
    ),
    # Understanding R1-Zero-like training, arXiv:2503.20783: no division by the std nor by the reply's length, no KL.
    "dr_grpo": _preset(advantage={"scale": "none"}, loss={"aggregate": "seq_mean_token_sum_norm"}),
    # CollabLLM's document writing with verl: the update of configs/medium_qwen3_4b.yaml.
    "collabllm": _preset(loss={"dual_clip": 3.0, "kl_coef": 0.001, "kl_estimator": "low_var_kl"}),
}
