"""An episode's record in Gymnasium's words: texts, conversations and infos, made anew for everyone who asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from agentenv.chat import text_of
from agentenv.gym.plain_text import tools_text
from agentenv.stepping import SteppedEpisode
from agentenv.trajectory import Trajectory
from agentenv.types import Message, StepResult


def text_now(trajectory: Trajectory) -> str:
    """What the environment says now: the prompt, with the tools it offers, or its reply to the last action."""
    if not trajectory.turns:
        tools = [tools_text(trajectory.tools)] if trajectory.tools else []
        return "\n\n".join([*tools, as_text(trajectory.prompt)])
    result = trajectory.turns[-1].result
    return as_text(result.observation) if result is not None else ""


def as_text(observation: str | Sequence[Message]) -> str:
    """Text as it is; one message of a user as what it says; of others and of several, who says it as well."""
    if isinstance(observation, str):
        return str(observation)
    if len(observation) == 1 and observation[0].get("role") == "user":
        return text_of(observation[0])
    return "\n\n".join(f"{str(message.get('role')).capitalize()}: {text_of(message)}" for message in observation)


def conversation(trajectory: Trajectory) -> list[dict[str, Any]]:
    """All messages so far, actions as the assistant's; raw text of the environment as a user's.

    An action that nothing followed goes on with the next one: together they are one message.
    """
    messages = _as_messages(trajectory.prompt)
    begun = False
    for turn in trajectory.turns:
        if begun:
            messages[-1]["content"] += turn.action
        else:
            messages.append({"role": "assistant", "content": turn.action})
        said = turn.result.observation if turn.result is not None else ""
        messages += _as_messages(said)
        begun = not said
    return messages


def _as_messages(observation: str | Sequence[Message]) -> list[dict[str, Any]]:
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}] if observation else []
    return [dict(deepcopy(message)) for message in observation]


def first_info(episode: SteppedEpisode) -> dict[str, Any]:
    """The info of `reset`: task_id, and the tools that the environment offers, as their text."""
    trajectory = episode.trajectory
    info: dict[str, Any] = {"task_id": trajectory.task.task_id}
    if trajectory.tools:
        info["tools"] = tools_text(trajectory.tools)
    return info


def info_of(episode: SteppedEpisode, result: StepResult) -> dict[str, Any]:
    """The info of `step`: the environment's own facts, score where it gave one, stop_reason at the end.

    Numbers are floats, all else is text: nothing in it depends on the clock, nothing is ragged.
    """
    info = facts_of(result.info)
    if result.score is not None:
        info["score"] = float(result.score)
    reason = episode.trajectory.stop_reason
    if episode.over and reason is not None:
        info["stop_reason"] = str(reason)
    return info


def facts_of(info: Mapping[str, float | str]) -> dict[str, Any]:
    """Numbers as floats, text as text."""
    return {key: str(value) if isinstance(value, str) else float(value) for key, value in info.items()}


def transcript(trajectory: Trajectory) -> str:
    """The episode so far for readers: who says what, and what each action earned. It only ever grows."""
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
