"""Published methods as settings: each is a loss × an aggregation × a scale, and what goes with it.

`preset: dapo` in a file puts these under the file's own settings, which win; `preset=dapo` on the command
line goes over the file, as every override does. Learning rate, batch and data stay the run's own.
"""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # DeepSeekMath, arXiv:2402.03300, eq. 3 and 4 and section 4.2.
    "grpo": {
        "advantage": {"baseline": "mean", "scale": "group_std"},
        "loss": {
            "variant": "grpo",
            "aggregate": "seq_mean_token_mean",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "kl_coef": 0.04,
            "kl_estimator": "k3",
        },
    },
    # DAPO, arXiv:2503.14476, section 4.1: clip-higher, token-level loss, dynamic sampling, soft overlong penalty
    # over the last fifth of the reply, no KL.
    "dapo": {
        "rollout": {"dynamic_sampling": {"max_rounds": 3}},
        "rewards": {"soft_overlong": {"buffer": 0.2, "penalty": 1.0}, "truncated": "score"},
        "advantage": {"baseline": "mean", "scale": "group_std"},
        "loss": {
            "variant": "grpo",
            "aggregate": "token_mean",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "kl_coef": 0.0,
        },
    },
    # Understanding R1-Zero-like training, arXiv:2503.20783: no division by the std nor by the reply's length, no KL.
    "dr_grpo": {
        "advantage": {"baseline": "mean", "scale": "none"},
        "loss": {
            "variant": "grpo",
            "aggregate": "seq_mean_token_sum_norm",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "kl_coef": 0.0,
        },
    },
    # CollabLLM's document writing with verl: the update of configs/medium_qwen3_4b.yaml.
    "collabllm": {
        "advantage": {"baseline": "mean", "scale": "group_std"},
        "loss": {
            "variant": "grpo",
            "aggregate": "token_mean",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "dual_clip": 3.0,
            "kl_coef": 0.001,
            "kl_estimator": "low_var_kl",
        },
    },
}
