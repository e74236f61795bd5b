"""NeMo Gym's rollouts, and the failures that it writes beside them; of NeMo Gym 0.7."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentenv.core.types import Answer, Message, StopReason, Task
from agentenv.view.foreign import building
from agentenv.view.foreign.building import Call, Episodes, Json, content_text, failure, number_of

_OWN = {"responses_create_params", "response", "reward"}


class NemoGymReader(building.Reader):
    """A line is an episode. Siblings have one task index and agent."""

    peer, files, keys = "NeMo Gym", "rollouts", frozenset({"_ng_task_index", "_ng_rollout_index"})

    def sources(self, path: Path) -> building.Sources:
        """Yield the lines of a file, and those of its failures."""
        yield from super().sources(path)
        beside = path.with_name(f"{path.stem}_failures.jsonl")
        if beside.is_file():  # a rollout of both files did not fail in the end
            yield from super().sources(beside)

    def episodes(self, value: Json) -> Episodes:
        """Yield the episode of a rollout."""
        error, asked = None, value.get("responses_create_params") or {}
        if "_ng_failure_class" in value:
            error = failure(value["_ng_failure_class"], value.get("_ng_failure_message"))
        elif value.get("mask_sample"):  # its reward measures nothing
            error = failure(value.get("failure_kind") or "mask_sample", value.get("failure_reason"))
        response = value.get("response") or {} if error else value["response"]
        prompt, agent = asked.get("input") or [], (value.get("agent_ref") or {}).get("name")
        prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*map(_message, prompt)]
        if asked.get("instructions"):
            prompt.insert(0, {"role": "system", "content": str(asked["instructions"])})
        others = {key: value[key] for key in value if key not in _OWN}
        info = {key: others[key] for key in others if not key.startswith("_ng_")}
        calls = _calls(response.get("output") or [], response.get("model") or "", prompt)
        task = Task(prompt, task_id=f"{value['_ng_task_index']:06d}{f':{agent}' if agent else ''}", metadata=others)
        yield building.build_episode(
            task, str(value["_ng_rollout_index"]), calls, None if error else number_of(value.get("reward")), info,
            StopReason.MAX_LENGTH if response.get("incomplete_details") else StopReason.TERMINATED, error,
            tools=asked.get("tools"),
        )  # fmt: skip


def _calls(items: list[Json], model: str, prompt: list[Message]) -> list[Call]:
    """Return the generations in an output, and add to the prompt what others said before them.

    One ends with the item that has its tokens, or before an item of others.
    """
    calls: list[Call] = []
    said: list[Json] = []
    for item, following in zip(items, [*items[1:], {}], strict=False):
        if not _is_said(item):
            (calls[-1].observation if calls else prompt).append(_message(item))
            continue
        said.append(item)
        if "generation_token_ids" in item or not _is_said(following):
            calls.append(_call(said, model))
            said = []
    return calls


def _is_said(item: Json) -> bool:
    """Return True for what a model wrote: reasoning, messages, calls, those that its server executed included."""
    kind = str(item.get("type"))
    return item.get("role") == "assistant" or kind == "reasoning" or kind.endswith("_call")


def _call(said: list[Json], model: str) -> Call:
    thought = [content_text(i.get("content") or i.get("summary")) for i in said if i.get("type") == "reasoning"]
    text = "".join(content_text(item.get("content")) for item in said if item.get("role") == "assistant")
    called = tuple(_called(item) for item in said if str(item.get("type")).endswith("_call"))
    last, answer = said[-1], Answer(text, called, "\n".join(thought), model)
    ids = last.get("prompt_token_ids") or (), last.get("generation_token_ids") or ()
    return Call(answer, *ids, last.get("generation_log_probs"), last.get("status"))


def _message(item: Json) -> Message:
    if item.get("type", "message") == "message":
        return {"role": str(item.get("role", "user")), "content": content_text(item.get("content"))}
    if "output" in item:
        return {"role": "tool", "tool_call_id": str(item.get("call_id")), "content": content_text(item["output"])}
    return {"role": "assistant", "content": content_text(item.get("summary")), "tool_calls": [_called(item)]}


def _called(item: Json) -> dict[str, Any]:
    arguments = item["arguments"] if "arguments" in item else json.dumps(item)
    return building.tool_call(item.get("call_id") or item.get("id"), item.get("name") or item.get("type"), arguments)
