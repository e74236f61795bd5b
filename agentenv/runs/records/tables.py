"""A run as flat tables: one row per episode, one row per turn; for `agentenv export`, `Run` and filters."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from agentenv._util.jsonable import jsonable
from agentenv.chat.chat import text_of
from agentenv.core.trajectory import Trajectory, Turn

Row = dict[str, Any]

EPISODE_COLUMNS = {
    "episode_id": "the episode",
    "task_id": "its task",
    "group_id": "shared by the episodes of a task",
    "env": "the task's environment in a mixture",
    "prompt": "the first observation; messages are joined by empty lines",
    "label": "the task's label as text",
    "reward": "sum over the turns; empty if unknown",
    "score": "the last score of a turn",
    "stop_reason": "why the episode ended",
    "num_turns": "number of turns",
    "num_tokens": "number of tokens in all segments; empty if the server did not count those of the last turn",
    "num_action_tokens": "number of sampled tokens; empty if a server did not count them",
    "policy_version": "newest version of the weights that sampled a token",
    "cost_usd": "dollars that an API model cost, for `--prices`",
    "attempt": "number of earlier attempts that failed",
    "num_step_retries": "how often `step` was called again, in all attempts",
    "retried_errors": "errors after which a step or the episode ran again, and how often, such as `InfraError 2`",
    "seed": "seed of the environment",
    "generate_s": "seconds in the engine",
    "step_s": "seconds in the environment's `step`",
    "last_action": "the last action",
    "error": "class and message of the failure",
    "error_kind": "what failed: `infra`, `env`, `contract` or `data`",
    "error_place": "file and line of the failure in the environment",
}
"""Columns of episodes and their meaning; `info.KEY` follows for each key of `StepResult.info`, from its last turn."""

TURN_COLUMNS = {
    "episode_id": "the episode",
    "task_id": "its task",
    "turn_index": "index of the turn, from 0",
    "action": "the action",
    "observation": "the reply; messages are JSON",
    "reward": "reward of the turn; empty if its step failed",
    "score": "score of the turn",
    "finish_reason": "why the generation ended",
    "model": "the model that a server of chat completions named",
    "num_action_tokens": "number of sampled tokens; empty if a server did not count them",
    "policy_version": "newest version of the weights that sampled a token",
    "generate_s": "seconds in the engine",
    "step_s": "seconds in the environment's `step`",
    "num_retries": "how often `step` was called again",
    "num_request_retries": "how often the request for the action was sent to a server again",
    "num_failovers": "1 if an engine failed before another one sampled the action, else 0",
}
"""Columns of turns and their meaning; `info.KEY` follows for each key of `StepResult.info`."""

INTEGERS = frozenset(
    [
        "num_turns", "num_tokens", "num_action_tokens", "policy_version", "attempt", "num_step_retries", "seed",
        "turn_index", "num_retries", "num_request_retries", "num_failovers",
    ]
)  # fmt: skip
FLOATS = frozenset(["reward", "score", "cost_usd", "generate_s", "step_s"])
"""Columns of numbers; the others are text, and `info.KEY` is a float where all its values are numbers."""


def episode_row(trajectory: Trajectory) -> Row:
    """Return the row of an episode: `EPISODE_COLUMNS`, then `info.KEY`."""
    task, error, turns = trajectory.task, trajectory.error, trajectory.turns
    prompt = trajectory.prompt or task.prompt
    versions = [version for turn in turns if (version := _version(trajectory, turn)) is not None]
    info = {key: value for turn in turns for key, value in _info(turn).items()}
    return {
        "episode_id": trajectory.episode_id,
        "task_id": task.task_id,
        "group_id": trajectory.group_id,
        "env": task.env or None,
        "prompt": prompt if isinstance(prompt, str) else "\n\n".join(map(text_of, prompt)),
        "label": None if task.label is None else str(task.label),
        "reward": trajectory.reward,
        "score": trajectory.score,
        "stop_reason": None if trajectory.stop_reason is None else trajectory.stop_reason.value,
        "num_turns": len(turns),
        "num_tokens": trajectory.num_tokens if trajectory.is_counted else None,
        "num_action_tokens": sum(counts) if None not in (counts := list(map(_num_tokens, turns))) else None,
        "policy_version": max(versions, default=None),
        "cost_usd": trajectory.cost_usd,
        "attempt": trajectory.attempt,
        "num_step_retries": trajectory.num_step_retries,
        "retried_errors": ", ".join(f"{name} {num}" for name, num in Counter(trajectory.retried).items()) or None,
        "seed": trajectory.seed,
        "generate_s": math.fsum(turn.generate_s for turn in turns),
        "step_s": math.fsum(turn.step_s for turn in turns),
        "last_action": turns[-1].action if turns else None,
        "error": None if error is None else f"{error.type}: {error.message}",
        "error_kind": None if error is None else error.kind,
        "error_place": None if error is None else error.place,
        **info,
    }


def turn_rows(trajectory: Trajectory) -> list[Row]:
    """Return a row for each turn: `TURN_COLUMNS`, then `info.KEY`."""
    return [
        {
            "episode_id": trajectory.episode_id,
            "task_id": trajectory.task.task_id,
            "turn_index": index,
            "action": turn.action,
            "observation": observation_text(turn),
            "reward": turn.result.reward if turn.result else None,
            "score": turn.result.score if turn.result else None,
            "finish_reason": turn.finish_reason,
            "model": None if turn.answer is None else turn.answer.model or None,
            "num_action_tokens": _num_tokens(turn),
            "policy_version": _version(trajectory, turn),
            "generate_s": turn.generate_s,
            "step_s": turn.step_s,
            "num_retries": turn.num_retries,
            "num_request_retries": turn.num_request_retries,
            "num_failovers": turn.num_failovers,
            **_info(turn),
        }
        for index, turn in enumerate(trajectory.turns)
    ]


def observation_text(turn: Turn) -> str:
    """Return the reply to an action as text; messages are JSON."""
    observation = turn.result.observation if turn.result else ""
    if isinstance(observation, str):
        return observation
    return json.dumps(jsonable(observation), ensure_ascii=False)


def _num_tokens(turn: Turn) -> int | None:
    return turn.num_tokens if turn.is_counted else None


def _version(trajectory: Trajectory, turn: Turn) -> int | None:
    return max(trajectory.segments[turn.segment].policy_versions[turn.start : turn.end], default=None)


def _info(turn: Turn) -> Mapping[str, Any]:
    return {} if turn.result is None else {f"info.{key}": value for key, value in turn.result.info.items()}
