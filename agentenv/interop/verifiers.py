"""Episodes as verifiers' Traces, on which prime-rl trains: one for an episode, a branch of its graph for each segment.

Source: verifiers/v1/trace.py (Trace, Branch, ModelCall) and v1/graph.py (MessageNode), 0.4.0, which has no
TrajectoryStep any more. A node is a message with the tokens that it adds: those of a path from a root to a leaf,
joined, are a segment. Each segment begins at a root, so messages before it are stored again. Tokens of a prompt or an
observation of several messages are all at the last of them; tokens that no message explains are at the action after
them. The caller sets `agent`, which names verifiers' own configuration. A failed episode is refused: verifiers reads a
trace without rewards as 0. Lost of foreign traces: nothing that a Record has; of ours nothing, because `info` has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentenv.core.trajectory import Trajectory, Turn
from agentenv.core.types import Message
from agentenv.core.views import messages_of
from agentenv.errors import DataError
from agentenv.interop._records import Decode, Record, facts, joined, records, required_logprobs, turns_of

_WHERE = "interop.verifiers"
_INFO = "agentenv"
"""Key of our facts in a trace's `info`: a list, with an entry for each branch."""


def to_records(trajectory: Trajectory, *, decode: Decode) -> list[dict[str, Any]]:
    """Return the one trace of an episode, as `WireTrace.model_validate` takes it once `agent` is set.

    The reward is named `reward`; the rewards of turns are in `info`, because a trace's are of the whole episode.

    Raises:
        DataError: the episode failed or is still running, or a log-probability is missing.
    """
    made = records(trajectory, _WHERE)
    nodes: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    turns = list(trajectory.turns)
    for record in made:
        own = turns_of(trajectory, record)
        before = messages_of(replace(trajectory, turns=turns[: turns.index(own[0])] if own else []))
        _append_branch(nodes, calls, record, own, before or decode(record.prompt_ids))
    task = trajectory.task
    return [
        {
            "version": 1,
            "id": trajectory.episode_id,
            "task": {"type": "Task", "data": {"id": task.task_id, "prompt": task.prompt}, "key": task.task_id},
            "nodes": nodes,
            "calls": calls,
            "rewards": {"reward": {"score": trajectory.reward, "weight": 1.0}},
            "metrics": {"num_turns": float(len(turns))},
            "info": {_INFO: [{**facts(record), "num_prompt": record.num_prompt} for record in made]},
            "is_completed": True,
            "ok": True,
            "stop_condition": None if trajectory.stop_reason is None else trajectory.stop_reason.value,
            "is_timeout": False,
        }
    ]


def _append_branch(
    nodes: list[dict[str, Any]],
    calls: list[dict[str, Any]],
    record: Record,
    turns: Sequence[Turn],
    prompt: str | Sequence[Message],
) -> None:
    """Append a segment's nodes, from a root to a leaf, and a call for each action."""
    parent: int | None = None
    logprobs, mask, ids = required_logprobs(record, _WHERE), record.mask, record.token_ids
    said: Sequence[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    first, end = 0, 0
    for (start, end), turn in zip(record.spans, turns, strict=True):
        for message in said:
            held = ids[first:start] if message is said[-1] else []
            nodes.append(_node(parent, message, held, [False] * len(held)))
            parent, first = len(nodes) - 1, first + len(held)
        chosen = [bool(one) for one in mask[first:end]]
        action = _node(parent, {"role": "assistant", "content": turn.action}, ids[first:end], chosen)
        action |= {"sampled": True, "logprobs": [logprobs[i] for i in range(first, end) if mask[i]]}
        nodes.append(action)
        parent, first = len(nodes) - 1, end
        reason = turn.finish_reason if turn.finish_reason in ("stop", "length") else None
        calls.append({"node": parent, "finish_reason": reason})
        reply = turn.result.observation if turn.bridge is not None and turn.result is not None else ""
        said = reply if not isinstance(reply, str) else [{"role": "user", "content": reply}] if reply else []
    if not record.spans:  # an episode whose agent never asked for an action
        nodes.append(_node(None, {"role": "user", "content": ""}, ids, [False] * len(ids)))


def _node(parent: int | None, message: Message, token_ids: list[int], mask: list[bool]) -> dict[str, Any]:
    return {"parent": parent, "message": dict(message), "token_ids": token_ids, "mask": mask}


def from_records(traces: Sequence[Mapping[str, Any]]) -> list[Record]:
    """Return Records of traces, one for each branch; the traces are dicts, as `Trace.model_dump` returns.

    Raises:
        DataError: a branch has a sampled message without tokens, or tokens and log-probabilities of unequal number.
    """
    return [record for trace in traces for record in _records(trace)]


def _records(trace: Mapping[str, Any]) -> Iterator[Record]:
    known = (trace.get("info") or {}).get(_INFO) or []
    given = [one for one in (trace.get("rewards") or {}).values() if one is not None]
    reward = sum(one["score"] * one.get("weight", 1.0) for one in given) if given else None
    for index, path in enumerate(_branches(trace["nodes"])):
        ids, spans, forced, logprobs = list[int](), list[list[int]](), list[int](), list[float]()
        for node in path:
            mask, sampled = node.get("mask") or [], list(node.get("logprobs") or [])
            if (node.get("sampled") and not node.get("token_ids")) or len(sampled) != sum(mask):
                raise DataError(
                    f"{_WHERE}: expected token ids and {sum(mask)} log-probabilities of each sampled message, got "
                    f"{len(node.get('token_ids') or [])} and {len(sampled)}. Let the client return token ids."
                )
            places = [len(ids) + at for at, chosen in enumerate(mask) if chosen]
            values = dict(zip(places, sampled, strict=True))
            if places:
                spans.append([places[0], places[-1] + 1])
                forced += [at for at in range(places[0], places[-1]) if at not in values]
            logprobs += [values.get(at, 0.0) for at in range(len(ids), len(ids) + len(node["token_ids"]))]
            ids += node["token_ids"]
        more = known[index] if index < len(known) else {}
        num = more.get("num_prompt", spans[0][0] if spans else len(ids))
        more = more or {
            "turn_spans": [[start - num, end - num] for start, end in spans],
            "forced_tokens": [at - num for at in forced],
        }
        fields = joined(ids[:num], ids[num:], None, logprobs=logprobs[num:], more=more)
        yield Record(**fields, reward=reward)


def _branches(nodes: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Yield the path from the root to each leaf, in the order of the leaves."""
    parents = {node.get("parent") for node in nodes}
    for leaf in range(len(nodes)):
        if leaf in parents:
            continue
        path: list[Mapping[str, Any]] = []
        at: int | None = leaf
        while at is not None:
            path.append(nodes[at])
            at = nodes[at].get("parent")
        yield path[::-1]
