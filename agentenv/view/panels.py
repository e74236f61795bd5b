"""The curves of a training on the page."""

from __future__ import annotations

from typing import Any

PANELS: dict[str, tuple[str, dict[str, str]]] = {
    "Reward": ("mean reward of an episode", {"rollout/reward": "training", "eval/reward": "held-out"}),
    "Score": ("mean score of an episode (0–1)", {"rollout/score": "training", "eval/score": "held-out"}),
    "Pass@k": ("share of tasks", {"rollout/pass@": "training, k = ", "eval/pass@": "held-out, k = "}),
    "Length": ("sampled tokens per episode", {"rollout/action_tokens": "training", "eval/action_tokens": "held-out"}),
    "Turns": ("turns per episode", {"rollout/turns": "training", "eval/turns": "held-out"}),
    "Gradient": ("norm before clipping", {"train/grad_norm": "policy", "train/critic_grad_norm": "critic"}),
    "Time": (
        "seconds of a train step",
        {f"time/{name}_s": name for name in ("wall", "wait", "train", "sync", "eval", "save")},
    ),
    "KL and mismatch": (
        "nats per token",
        {
            "train/kl": "to the reference",
            "train/approx_kl": "within a step",
            "train/logprob_diff": "|learner − engine|",
        },
    ),
    "Entropy": ("nats per token", {"train/entropy": "policy"}),
    "Staleness": ("policy updates", {"rollout/staleness_mean": "mean", "rollout/staleness_max": "max"}),
}
"""Panels by title: the label of the y axis, and the label of each key of metrics.jsonl. A key that ends with @ stands
for those that begin with it, of the least and of the greatest k."""
PREFIXES = {"environment": "rollout/env/", "held-out set": "eval/set/"}
"""Beginnings of the keys of the environments of a mixture, and of several held-out sets."""
BY_ENVIRONMENT = {
    "Reward": ("mean reward of an episode", "reward"),
    "Score": ("mean score of an episode (0–1)", "score"),
    "Pass@1": ("share of tasks", "pass@1"),
    "Length": ("sampled tokens per episode", "action_tokens"),
    "Spread": ("std of a group's rewards (mean)", "reward/std_in_group"),
}
"""Panels of a mixture, with a line for each environment: the label of the y axis, and the end of the keys."""


def panels_json() -> list[dict[str, Any]]:
    """Return the panels for the page, those by environment with `*` for its name."""
    panels = [(title, label, list(keys.items())) for title, (label, keys) in PANELS.items()]
    for what, prefix in PREFIXES.items():
        panels += [
            (f"{title} by {what}", label, [(f"{prefix}*/{end}", "*")]) for title, (label, end) in BY_ENVIRONMENT.items()
        ]
    return [{"title": title, "label": label, "series": [list(each) for each in keys]} for title, label, keys in panels]
