"""NeMo Gym's rows as tasks, and episodes as its verified responses: OpenAI's Responses API with tokens.

Source: nemo_gym/base_resources_server.py and openai_utils.py, 0.6.0 of 2026-08-22 (07d6b0d0); NeMo RL's assertions on
an answer are in nemo_rl/environments/nemo_gym.py (7ea279a).
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentenv._util.brief import brief
from agentenv._util.http.json_bodies import json_text
from agentenv.chat.chat import text_of
from agentenv.core.messages import as_messages
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Message, SamplingParams, Task
from agentenv.episode.endpoint.responses import ResponseLog
from agentenv.episode.endpoint.wire import read_message
from agentenv.errors import ContractError, DataError, InfraError

LABEL_KEYS = ("label", "expected_answer", "ground_truth", "answer")
"""Columns that may have a row's label; the first existing one counts."""
_SAMPLING: Mapping[str, tuple[str, Any]] = {
    "temperature": ("temperature", (int, float)),
    "top_p": ("top_p", (int, float)),
    "max_output_tokens": ("max_tokens", int),
}


@dataclass(frozen=True, slots=True)
class GymRun:
    """The content of one `POST /run`."""

    task: Task
    sampling: SamplingParams
    body: Mapping[str, Any]


def read_run(body: Any, sampling: SamplingParams) -> GymRun:
    """Return the task and the sampling of a row; the row's values take precedence over `sampling`.

    Raises:
        DataError: the body is not a row of NeMo Gym's with messages as input.
    """
    params = body.get("responses_create_params") if isinstance(body, Mapping) else None
    if not isinstance(params, Mapping):
        raise DataError(f"body: expected an object with responses_create_params, got {brief(body, 120)}. Send a row.")
    try:
        json_text(body, allow_nan=False)  # the answer contains it
    except (ValueError, RecursionError) as error:
        raise DataError(f"body: expected JSON without NaN and Infinity, got one with: {error}. Fix the row.") from error
    messages = _messages(params)
    columns = {key: value for key, value in body.items() if key != "responses_create_params"}
    label = next((columns.pop(key) for key in LABEL_KEYS if columns.get(key) is not None), None)
    seed = columns.pop("seed", None)
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise DataError(f"seed: expected a whole number, got {seed!r:.80}. Fix the row.")
    index = columns.get("_ng_task_index")
    digest = hashlib.blake2b(json.dumps([messages, label]).encode(), digest_size=8).hexdigest()
    task_id = digest if index is None else str(index)[:80]
    columns |= {"tools": params["tools"]} if params.get("tools") else {}
    task = Task(messages, label=label, task_id=task_id, metadata=columns, seed=seed)
    changes: dict[str, Any] = {}
    for theirs, (ours, kinds) in _SAMPLING.items():
        value = params.get(theirs)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
            raise DataError(f"{theirs}: expected a number, got {value!r:.80}. Fix the row.")
        changes |= {} if value is None else {ours: value}
    try:
        return GymRun(task, replace(sampling, **changes), body)
    except ValueError as error:
        raise DataError(f"responses_create_params: {error}") from error


def _messages(params: Mapping[str, Any]) -> list[Message]:
    prompt, instructions = params.get("input"), params.get("instructions")
    given = ResponseLog().conversation({"input": prompt})
    items = prompt if isinstance(prompt, list) else []
    has_others = any(isinstance(item, dict) and item.get("type", "message") != "message" for item in items)
    if not given or has_others or any(len(message) != 2 or message.get("content") is None for message in given):
        raise DataError(
            f"input: expected text or messages with a role and text, got {brief(prompt, 120)}. Calls, reasoning and "
            "images in a history are not supported."
        )
    is_set = isinstance(instructions, str) and instructions
    system: list[Message] = [{"role": "system", "content": instructions}] if is_set else []
    return system + [read_message(message, f"input[{index}]") for index, message in enumerate(given)]


# --- the answer -------------------------------------------------------------------------------------------------------


def run_answer(
    request: GymRun, trajectory: Trajectory, *, model: str, components: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the row with the episode as `response`, its `reward`, and `reward_components` if requested.

    Every action is an item with `prompt_token_ids`, all tokens before it, `generation_token_ids` as sampled, and
    `generation_log_probs`. The observations between them are items without tokens.

    Raises:
        InfraError: a log-probability is missing, or the episode has no reward.
        ContractError: the history was rendered again, so that prompts do not extend each other; or a component is
            missing.
    """
    reward = trajectory.reward
    if reward is None:
        raise InfraError(
            f"run: expected a reward, got an episode that ended with {trajectory.stop_reason}. Run it again."
        )
    trajectory.check_tokens("run")
    if len(trajectory.segments) != 1:
        raise ContractError(
            f"run: expected one segment of tokens, got {len(trajectory.segments)}: NeMo RL needs each prompt to extend "
            "the last. Set history to keep."
        )
    answer = {**request.body, "response": _response(trajectory, model), "reward": reward}
    answer |= {"truncated": trajectory.truncated, "num_turns": len(trajectory.turns)}
    answer |= {} if trajectory.score is None else {"score": trajectory.score}
    if components:
        parts: dict[str, float] = {}
        for name in components:
            values = [turn.result.info.get(name) for turn in trajectory.turns if turn.result is not None]
            numbers = [float(value) for value in values if isinstance(value, int | float)]
            if len(numbers) != len(values):
                raise ContractError(
                    f"info: expected a number under {name!r} in every turn, got {values!r:.120}. Rename it."
                )
            parts[name] = math.fsum(numbers)
        parts["rest"] = reward - math.fsum(parts.values())
        answer |= {**parts, "reward": math.fsum(parts.values()), "reward_components": parts}
    return answer


def _response(trajectory: Trajectory, model: str) -> dict[str, Any]:
    ids, logprobs = list(trajectory.token_ids), list(trajectory.logprobs)
    items: list[dict[str, Any]] = []
    for index, turn in enumerate(trajectory.turns):
        if any(math.isnan(each) for each in logprobs[turn.start : turn.end]):
            raise InfraError("run: expected a log-probability for each sampled token, got none. Use another engine.")
        if turn.forced:
            raise ContractError(
                "run: expected tokens that the policy chose, got some that a constraint forced, which NeMo Gym cannot "
                "mask. Do without tool_choice and response_format."
            )
        item = {
            "id": f"msg_{trajectory.episode_id}_{index}",
            "type": "message",
            "role": "assistant",
            "status": "incomplete" if turn.finish_reason == "length" else "completed",
            "content": [{"type": "output_text", "text": turn.action, "annotations": []}],
            "prompt_token_ids": ids[: turn.start],
            "generation_token_ids": ids[turn.start : turn.end],
            "generation_log_probs": logprobs[turn.start : turn.end],
        }
        items.append(item)
        if turn.result is not None and turn.bridge is not None:
            for message in as_messages(turn.result.observation):
                role, text = message.get("role"), text_of(message)
                role = role if role in ("user", "system", "developer") else "user"
                items += [{"type": "message", "role": role, "content": text}] if text else []
    generated, total = sum(trajectory.action_mask), len(trajectory.token_ids)
    cut = trajectory.truncated and trajectory.turns[-1].finish_reason == "length"
    return {
        "id": f"resp_{trajectory.episode_id}",
        "object": "response",
        "created_at": time.time(),
        "model": model,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": items,
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
