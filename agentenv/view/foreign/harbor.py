"""Harbor's trajectories (ATIF), of Harbor 0.26: a `trajectory.json`, the folder of a trial, or that of a job."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from agentenv.core.types import Answer, Message, StopReason, Task
from agentenv.view.foreign import building
from agentenv.view.foreign.building import Call, Episodes, Json, content_text, number_of

_RESULT, _TRAJECTORIES = "result.json", ("agent/trajectory.json", "agent/trajectory.cont-*.json")


class HarborReader(building.Reader):
    """A trial is an episode. Siblings are trials of one task."""

    peer, files, keys = "Harbor", "trajectory.json, or the folder of a trial or a job", frozenset({"agent", "steps"})

    def files_in(self, folder: Path) -> list[Path]:
        """Return the folders of a job's trials, or that of a trial."""
        if not (folder / _RESULT).is_file() or not (folder / "config.json").is_file():
            return []
        return sorted(each.parent for each in folder.glob(f"*/{_RESULT}")) or [folder]

    def sources(self, path: Path) -> building.Sources:
        """Yield the trajectory in a file, or those of the trials in a folder."""
        trials = ((each.name, partial(_trial, each)) for each in self.files_in(path))
        yield from trials if path.is_dir() else super().sources(path)

    def episodes(self, value: Json) -> Episodes:
        """Yield the episode of a trial."""
        result, agent = value.get("result") or {}, value["agent"]
        group = str(result.get("task_name") or value.get("session_id") or "0")
        rewards = (result.get("verifier_result") or {}).get("rewards") or {}
        exceptions = [each.get("exception_info") for each in (result, *(result.get("step_results") or []))]
        raised = next(filter(None, exceptions), None)
        error, stop_reason = None, StopReason.TERMINATED if rewards else None
        if raised is not None and not result.get("reward_valid"):
            error = building.failure(raised["exception_type"], raised["exception_message"])
        elif raised is not None:
            stop_reason = StopReason.EPISODE_TIMEOUT if "Timeout" in raised["exception_type"] else None
        only = next(iter(rewards.values())) if len(rewards) == 1 else rewards.get("reward")
        prompt, calls = _calls(value["steps"], agent.get("model_name") or "")
        facts = {"agent": agent, "trial": result.get("trial_name"), "rewards": rewards, "exception": raised}
        yield building.build_episode(
            Task(prompt, task_id=group, metadata=facts), next(self.numbers[group]), calls,
            None if error else number_of(only), rewards, stop_reason, error, tools=agent.get("tool_definitions"),
        )  # fmt: skip


def _trial(folder: Path) -> Json:
    """Return the result of a trial with the steps of its trajectories: continuations, and one for each of its steps.

    Agents write in these folders: no link is followed.
    """
    result = building.read_object(folder / _RESULT)
    found = [path for each in _TRAJECTORIES for place in (each, f"steps/*/{each}") for path in folder.glob(place)]
    found.sort(key=lambda each: (each.parent, len(each.name), each.name))
    links = [any((folder / part).is_symlink() for part in each.relative_to(folder).parents[:-1]) for each in found]
    parts = [building.read_object(each) for each, is_link in zip(found, links, strict=True) if not is_link]
    steps = [step for part in parts for step in part["steps"]]
    return {"agent": parts[0]["agent"] if parts else result.get("agent_info") or {}, "steps": steps, "result": result}


def _calls(steps: list[Json], model: str) -> tuple[list[Message], list[Call]]:
    """Return the messages before the first generation, and the generations. A copied step is a message."""
    prompt: list[Message] = []
    calls: list[Call] = []
    for step in steps:
        given = [(each["tool_call_id"], each["function_name"], each) for each in step.get("tool_calls") or []]
        called = [building.tool_call(call_id, name, json.dumps(each["arguments"])) for call_id, name, each in given]
        text, is_agent, new = content_text(step["message"]), step["source"] == "agent", list[Message]()
        if is_agent and not step.get("is_copied_context") and step.get("llm_call_count") != 0:
            m, thought = step.get("metrics") or {}, step.get("reasoning_content") or ""
            counts: list[Any] = [number_of(m.get(name)) for name in ("prompt_tokens", "completion_tokens", "cost_usd")]
            answer = Answer(text, tuple(called), thought, step.get("model_name") or model, *counts)
            ids = m.get("prompt_token_ids") or (), m.get("completion_token_ids") or ()
            calls.append(Call(answer, *ids, m.get("logprobs")))
        else:
            role = "assistant" if is_agent else step["source"]
            new.append({"role": role, "content": text, **({"tool_calls": called} if called else {})})
        for each in (step.get("observation") or {}).get("results") or []:
            call_id = each.get("source_call_id")
            whose = {"role": "tool", "tool_call_id": call_id} if call_id else {"role": "user"}
            new.append({**whose, "content": content_text(each.get("content"))})
        (calls[-1].observation if calls else prompt).extend(new)
    return prompt, calls
