"""Episodes with exact tokens, for what reads a record's tokens: played by the real loop on a family's tokenizer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from agentenv.chat.chat import Chat, ChatOptions
from agentenv.core.agent import AgentInstance
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Completion, Limits, SamplingParams, StepResult, Task
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.loop import run_episode
from agentenv.episode.setup import EpisodeKey
from tests.chat.families import FAMILIES, load

BY_NAME = {family.name: family for family in FAMILIES}


@dataclass(frozen=True)
class Played:
    trajectory: Trajectory
    tokenizer: Any
    stop_token_ids: list[int]


class _Answers(AgentInstance):
    def __init__(self, replies, tools):
        self.replies, self.tools = list(replies), tools

    async def reset(self, states):
        return {**states, **({"tools": self.tools} if self.tools else {})}

    async def step(self, states):
        if not self.replies:
            return StepResult(reward=1.0, score=0.5, terminated=True)
        reply = self.replies.pop(0)
        return reply if isinstance(reply, StepResult) else StepResult(reply)


def user(content, **more):
    return {"role": "user", "content": content, **more}


def tool(content):
    return {"role": "tool", "content": content, "name": "lookup", "tool_call_id": "callid000"}


def play(name, prompt, actions, replies=(), *, options=None, tools=None, episode_id="task-0/0", max_length=4000):
    """An episode of a family: actions are text (with its terminator, if it has one), ids or Completions."""
    family = BY_NAME[name]
    tokenizer = load(family)
    stops = tokenizer.convert_tokens_to_ids(list(family.stop_tokens))

    def completion(action):
        if isinstance(action, Completion):
            return action
        ids = tokenizer.encode(action, add_special_tokens=False) if isinstance(action, str) else list(action)
        return Completion(tuple(ids), logprobs=(-0.5,) * len(ids), policy_version=3)

    async def make():
        return _Answers(replies, tools)

    trajectory = asyncio.run(
        run_episode(
            make,
            Task(prompt),
            engine=ScriptedEngine([completion(action) for action in actions], tokenizer),
            chat=Chat(tokenizer, stop_token_ids=stops, options=options or ChatOptions()),
            sampling=SamplingParams(),
            limits=Limits(max_length=max_length, max_turns=len(actions)),
            key=EpisodeKey(episode_id, "task-0"),
        )
    )
    assert trajectory.error is None, trajectory.error
    return Played(trajectory, tokenizer, stops)
