"""prime-rl's and verifiers' `traces.jsonl`, of verifiers 0.4: an episode a line, a graph of messages for each agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentenv.core.trajectory import NO_VERSION
from agentenv.core.types import Answer, Message, StopReason, Task
from agentenv.view.foreign import building
from agentenv.view.foreign.building import Call, Episodes, Json, content_text, failure, number_of

_MAX_NODES, _MAX_TOKENS = 100_000, 10_000_000
"""Maximum sums over the paths to a trace's generations: they can grow with the square of its line."""


class PrimeReader(building.Reader):
    """A trace is an episode. Siblings have one group, or else one task, and one agent's name."""

    peer, files, keys = "prime-rl", "traces.jsonl", frozenset({"task", "traces", "ok"})

    def files_in(self, folder: Path) -> list[Path]:
        """Return the file of a folder."""
        return [each for each in (folder / self.files,) if each.is_file()]

    def episodes(self, value: Json) -> Episodes:
        """Yield an episode for each trace."""
        policy = ((value.get("run") or {}).get("work") or {}).get("policy") or {}
        version = policy["start"] if policy and policy["start"] == policy["end"] else NO_VERSION
        facts = {key: value.get(key) for key in ("id", "env", "run")}
        # An episode that failed before its first trace is one without turns.
        for number, trace in enumerate(value["traces"] or [{"errors": value.get("errors"), "ok": False}]):
            task, agent = trace.get("task") or value["task"], (trace.get("agent") or {}).get("name") or "agent"
            data, group = task.get("data") or {}, (value.get("group") or {}).get("id") or task.get("key")
            group = str(group or task["hash"])
            rewards = {key: each for key, each in (trace.get("rewards") or {}).items() if each}
            last = [{"type": trace.get("stop_condition")}, *(trace.get("errors") or [])][-1]
            error = None if trace.get("ok") else failure(last.get("type"), last.get("message"))
            scores = {key: number_of(each.get("score")) for key, each in rewards.items()}
            values = [score * rewards[key]["weight"] for key, score in scores.items() if score is not None]
            reward = sum(values) if values and len(values) == len(rewards) and error is None else None
            info = {**(trace.get("metrics") or {}), **scores}
            prompt, calls = _calls(trace, version)
            yield building.build_episode(
                Task(
                    prompt or data.get("prompt") or "", task_id=f"{group}:{agent}" if agent != "agent" else group,
                    metadata={**facts, "agent": agent, "data": data},
                ),
                f"{value['id']}{f'-{number}' if number else ''}", calls, reward, info,
                _stop_reason(trace.get("stop_condition")), error,
                tools=trace.get("tools"), began_s=number_of((trace.get("timing") or {}).get("start")),
            )  # fmt: skip


def _stop_reason(condition: str | None) -> StopReason | None:
    if condition is None or condition == "max_turns":
        return None if condition is None else StopReason.MAX_TURNS
    is_limit = condition.startswith("max_")
    limit = StopReason.MAX_LENGTH if is_limit else StopReason.EPISODE_TIMEOUT
    return limit if is_limit or condition.endswith("_timeout") else StopReason.TERMINATED


def _calls(trace: Json, version: int) -> tuple[list[Message], list[Call]]:
    """Return the messages before the first generation, and the generations, with the tokens before each.

    Raises:
        ValueError: the sampled tokens of a message are not in one piece at its end, or the paths are too long.
    """
    nodes: list[Json] = trace.get("nodes") or []
    made_by = {call["node"]: call for call in trace.get("calls") or [] if "node" in call}
    prompt: list[Message] = []
    calls: list[Call] = []
    leaf: int | None = None  # the last node of the sequence so far
    num_nodes = num_tokens = 0
    for index, node in enumerate(nodes):
        if not node.get("sampled"):
            continue
        path, continues = _path(nodes, index, leaf)
        num_nodes += len(path)
        num_tokens += sum(len(nodes[each].get("token_ids") or []) for each in path)
        if num_nodes > _MAX_NODES or num_tokens > _MAX_TOKENS:
            limits = f"{_MAX_NODES} nodes and {_MAX_TOKENS} tokens"
            raise ValueError(f"node {index}: expected paths of at most {limits}, got {num_nodes} and {num_tokens}")
        (calls[-1].observation if calls else prompt).extend(_message(nodes[each]["message"]) for each in path[:-1])
        before = [token for each in path[:-1] for token in nodes[each].get("token_ids") or []]
        ids, mask, made = node.get("token_ids") or [], node.get("mask") or [], made_by.get(index, {})
        start = len(mask) - sum(mask)
        if len(ids) != len(mask) or not all(mask[start:]):
            raise ValueError(f"node {index}: expected a mask of {len(ids)} tokens that ends with its ones, got {mask}")
        before += ids[:start]
        answer, finish = _answer(node["message"], made), made.get("finish_reason")
        time = {"start": 0.0, "end": 0.0, **(made.get("time") or {})}
        seconds = max(time["end"] - time["start"], 0.0)
        calls.append(Call(answer, before, ids[start:], node.get("logprobs"), finish, version, continues, seconds))
        leaf = index
    rest = nodes[0 if leaf is None else leaf + 1 :]
    (calls[-1].observation if calls else prompt).extend(_message(node["message"]) for node in rest)
    return prompt, calls


def _path(nodes: list[Json], index: int, leaf: int | None) -> tuple[list[int], bool]:
    """Return the nodes after `leaf`, or from the root if it is not an ancestor, to a node; and if it is one."""
    path: list[int] = []
    at: int | None = index
    while at is not None and at != leaf:
        path.append(at)
        parent = nodes[at].get("parent")
        if parent is not None and not 0 <= parent < at:
            raise ValueError(f"node {at}: expected an earlier node as parent, got {parent!r}")
        at = parent
    return path[::-1], at is not None


def _called(message: Json) -> list[dict[str, Any]]:
    return [building.tool_call(each["id"], each["name"], each["arguments"]) for each in message.get("tool_calls") or []]


def _answer(message: Json, made: Json) -> Answer:
    usage, text = made.get("usage") or {}, content_text(message.get("content"))
    num_input = usage["prompt_tokens"] + (usage.get("cached_input_tokens") or 0) if usage else None
    counts: list[Any] = [number_of(each) for each in (num_input, usage.get("completion_tokens"), usage.get("cost"))]
    thought = message.get("reasoning_content") or ""
    return Answer(text, tuple(_called(message)), thought, made.get("model") or "", *counts)


def _message(message: Json) -> Message:
    known = {key: message[key] for key in ("role", "tool_call_id", "name") if key in message}
    called = {"tool_calls": _called(message)} if message.get("tool_calls") else {}
    return {**known, "content": content_text(message.get("content")), **called}
