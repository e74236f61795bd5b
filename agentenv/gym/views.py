"""Gymnasium's views of an episode's record: texts, conversations and infos, built at each call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from agentenv.chat.chat import text_of
from agentenv.chat.tool_roles import tools_text
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Message, StepResult
from agentenv.episode.stepping import SteppedEpisode


def text_now(trajectory: Trajectory) -> str:
    """Return the latest observation: the prompt with the offered tools, or the reply to the last action."""
    if not trajectory.turns:
        tools = [tools_text(trajectory.tools)] if trajectory.tools else []
        return "\n\n".join([*tools, as_text(trajectory.prompt)])
    result = trajectory.turns[-1].result
    return as_text(result.observation) if result is not None else ""


def as_text(observation: str | Sequence[Message]) -> str:
    """Return an observation as text: one user message without its role, other messages with their roles."""
    if isinstance(observation, str):
        return str(observation)
    if len(observation) == 1 and observation[0].get("role") == "user":
        return text_of(observation[0])
    return "\n\n".join(f"{str(message.get('role')).capitalize()}: {text_of(message)}" for message in observation)


def conversation(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return all messages so far: actions as the assistant's, raw text of the environment as a user's.

    An action without a reply and the next action form one message.
    """
    messages = _as_messages(trajectory.prompt)
    is_open = False
    for turn in trajectory.turns:
        if is_open:
            messages[-1]["content"] += turn.action
        else:
            messages.append({"role": "assistant", "content": turn.action})
        observation = turn.result.observation if turn.result is not None else ""
        messages += _as_messages(observation)
        is_open = not observation
    return messages


def _as_messages(observation: str | Sequence[Message]) -> list[dict[str, Any]]:
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}] if observation else []
    return [dict(deepcopy(message)) for message in observation]


def first_info(episode: SteppedEpisode) -> dict[str, Any]:
    """Return the info of `reset`: task_id, and the offered tools as text."""
    trajectory = episode.trajectory
    info: dict[str, Any] = {"task_id": trajectory.task.task_id}
    if trajectory.tools:
        info["tools"] = tools_text(trajectory.tools)
    return info


def info_of(episode: SteppedEpisode, result: StepResult) -> dict[str, Any]:
    """Return the info of `step`: the environment's facts, its score if any, and stop_reason at the end.

    Numbers are floats, everything else is text; nothing depends on the clock.
    """
    info = facts_of(result.info)
    if result.score is not None:
        info["score"] = float(result.score)
    reason = episode.trajectory.stop_reason
    if episode.over and reason is not None:
        info["stop_reason"] = str(reason)
    return info


def facts_of(info: Mapping[str, float | str]) -> dict[str, Any]:
    """Return the facts with numbers as floats and text as str."""
    return {key: str(value) if isinstance(value, str) else float(value) for key, value in info.items()}


def transcript(trajectory: Trajectory) -> str:
    """Return the episode so far as readable text with roles and rewards. A later transcript extends an earlier one."""
    parts = [f"[{trajectory.task.task_id}]\n", *map(_paragraph, _as_messages(trajectory.prompt))]
    for turn in trajectory.turns:
        parts.append(_paragraph({"role": "assistant", "content": turn.action}))
        if turn.result is not None:
            score = "" if turn.result.score is None else f", score {turn.result.score:g}"
            parts.append(f"(reward {turn.result.reward:g}{score})\n")
            parts += map(_paragraph, _as_messages(turn.result.observation))
    return "".join(parts) + (f"[{trajectory.stop_reason}]\n" if trajectory.stop_reason is not None else "")


def _paragraph(message: Message) -> str:
    return f"{message.get('role')}: {text_of(message)}\n"
