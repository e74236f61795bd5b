"""NeMo Gym's rows read as tasks, and episodes written as its verified responses: OpenAI's Responses API with tokens.

Source: nemo_gym/base_resources_server.py and openai_utils.py, 0.6.0 of 2026-08-22 (07d6b0d0); what NeMo RL asserts of
an answer is in nemo_rl/environments/nemo_gym.py (7ea279a).
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentenv.chat import text_of
from agentenv.errors import ContractError, DataError, InfraError
from agentenv.trajectory import Trajectory
from agentenv.types import Message, SamplingParams, Task

LABEL_KEYS = ("label", "expected_answer", "ground_truth", "answer")
"""Columns in which a row's label is looked for, the first that is there."""
_SAMPLING: Mapping[str, tuple[str, Any]] = {
    "temperature": ("temperature", (int, float)),
    "top_p": ("top_p", (int, float)),
    "max_output_tokens": ("max_tokens", int),
}
_TEXT_PARTS = ("input_text", "output_text", "text")


@dataclass(frozen=True, slots=True)
class RunRequest:
    """One `POST /run`, read."""

    task: Task
    sampling: SamplingParams
    body: Mapping[str, Any]


def read_run(body: Any, sampling: SamplingParams) -> RunRequest:
    """The task and the sampling of a row; what the row says of the sampling goes before `sampling`.

    Raises:
        DataError: it is no row of NeMo Gym's with an input of messages.
    """
    params = body.get("responses_create_params") if isinstance(body, Mapping) else None
    if not isinstance(params, Mapping):
        raise DataError(f"body: expected an object with responses_create_params, got {body!r:.120}. Send a row.")
    try:
        json.dumps(body, allow_nan=False)  # it is given back
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"body: expected JSON without NaN and Infinity, got one with: {error}. Mend the row."
        ) from error
    messages = _messages(params)
    columns = {key: value for key, value in body.items() if key != "responses_create_params"}
    label = next((columns.pop(key) for key in LABEL_KEYS if columns.get(key) is not None), None)
    seed = columns.pop("seed", None)
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise DataError(f"seed: expected a whole number, got {seed!r:.80}. Mend the row.")
    index = columns.get("_ng_task_index")
    task_id = _digest(messages, label) if index is None else str(index)[:80]
    columns |= {"tools": params["tools"]} if params.get("tools") else {}
    task = Task(messages, label=label, task_id=task_id, metadata=columns, seed=seed)
    return RunRequest(task, _sampling_of(params, sampling), body)


def _sampling_of(params: Mapping[str, Any], sampling: SamplingParams) -> SamplingParams:
    given: dict[str, Any] = {}
    for theirs, (ours, kinds) in _SAMPLING.items():
        value = params.get(theirs)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
            raise DataError(f"{theirs}: expected a number, got {value!r:.80}. Mend the row.")
        given |= {} if value is None else {ours: value}
    try:
        return replace(sampling, **given)
    except ValueError as error:
        raise DataError(f"responses_create_params: {error}") from error


def _digest(messages: Sequence[Message], label: Any) -> str:
    return hashlib.blake2b(json.dumps([messages, label]).encode(), digest_size=8).hexdigest()


def _messages(params: Mapping[str, Any]) -> list[Message]:
    given = params.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise DataError(f"input: expected text or messages, got {given!r:.120}. Mend the row.")
    instructions = params.get("instructions")
    first = [{"role": "system", "content": instructions}] if isinstance(instructions, str) and instructions else []
    return [*first, *(_message(index, item) for index, item in enumerate(items))]


def _message(index: int, item: Any) -> Message:
    is_message = isinstance(item, Mapping) and item.get("type", "message") == "message"
    content = item.get("content") if is_message else None
    if isinstance(content, list):
        texts = [part.get("text") if _is_text(part) else None for part in content]
        content = None if None in texts else "".join(map(str, texts))
    if not is_message or not isinstance(item.get("role"), str) or not isinstance(content, str):
        raise DataError(
            f"input[{index}]: expected a message with a role and text, got {item!r:.120}. Calls, reasoning and images "
            "of a history are not taken."
        )
    return {"role": item["role"], "content": content}


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str)


# --- the answer -------------------------------------------------------------------------------------------------------


def run_answer(
    request: RunRequest, trajectory: Trajectory, *, model: str, components: Sequence[str] = ()
) -> dict[str, Any]:
    """The row, with the episode as `response`, its `reward`, and `reward_components` where some are asked for.

    Every action is an item with `prompt_token_ids`, all tokens before it, `generation_token_ids` as they were sampled
    and `generation_log_probs`; what the environment said stands between them without tokens.

    Raises:
        InfraError: a log-probability is missing, or the episode has no reward.
        ContractError: the history was rendered anew, so that prompts do not extend each other; or a component is none.
    """
    reward = trajectory.reward
    if reward is None:
        raise InfraError(
            f"run: expected a reward, got an episode that ended with {trajectory.stop_reason}. Run it again."
        )
    if len(trajectory.segments) != 1:
        raise ContractError(
            f"run: expected one segment of tokens, got {len(trajectory.segments)}: NeMo RL wants each prompt to extend "
            "the last. Set history to keep."
        )
    answer = {**request.body, "response": _response(trajectory, model), "reward": reward}
    answer |= {"truncated": trajectory.truncated, "num_turns": len(trajectory.turns)}
    answer |= {} if trajectory.score is None else {"score": trajectory.score}
    if components:
        parts = _components(trajectory, components)
        parts["rest"] = reward - math.fsum(parts.values())
        answer |= {**parts, "reward": math.fsum(parts.values()), "reward_components": parts}
    return answer


def _components(trajectory: Trajectory, names: Sequence[str]) -> dict[str, float]:
    parts = {}
    for name in names:
        values = [turn.result.info.get(name) for turn in trajectory.turns if turn.result is not None]
        numbers = [float(value) for value in values if isinstance(value, int | float)]
        if len(numbers) != len(values):
            raise ContractError(
                f"info: expected a number under {name!r} in every turn, got {values!r:.120}. Rename it."
            )
        parts[name] = math.fsum(numbers)
    return parts


def _response(trajectory: Trajectory, model: str) -> dict[str, Any]:
    generated, total = sum(trajectory.action_mask), len(trajectory.token_ids)
    cut = trajectory.truncated and trajectory.turns[-1].finish_reason == "length"
    return {
        "id": f"resp_{trajectory.episode_id}",
        "object": "response",
        "created_at": time.time(),
        "model": model,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(trajectory),
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": total - generated,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": total,
        },
    }


def _items(trajectory: Trajectory) -> list[dict[str, Any]]:
    ids, logprobs = list(trajectory.token_ids), list(trajectory.logprobs)
    items: list[dict[str, Any]] = []
    for index, turn in enumerate(trajectory.turns):
        if any(math.isnan(each) for each in logprobs[turn.start : turn.end]):
            raise InfraError("run: expected a log-probability for each sampled token, got none. Use another engine.")
        items.append(
            {
                "id": f"msg_{trajectory.episode_id}_{index}",
                "type": "message",
                "role": "assistant",
                "status": "incomplete" if turn.finish_reason == "length" else "completed",
                "content": [{"type": "output_text", "text": turn.action, "annotations": []}],
                "prompt_token_ids": ids[: turn.start],
                "generation_token_ids": ids[turn.start : turn.end],
                "generation_log_probs": logprobs[turn.start : turn.end],
            }
        )
        if turn.result is not None and turn.bridge is not None:
            items += _said(turn.result.observation)
    return items


def _said(observation: str | Sequence[Message]) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
    told = [(str(message.get("role")), text_of(message)) for message in messages if text_of(message)]
    return [
        {"type": "message", "role": role if role in ("user", "system", "developer") else "user", "content": text}
        for role, text in told
    ]
