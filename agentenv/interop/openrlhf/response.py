"""OpenRLHF's response dicts to and from trajectories: the only home of the dicts' key names.

Source: openrlhf/utils/agent.py and trainer/ppo_utils/samples_generator.py, 0.9.1 to 0.11.2.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal, TypedDict

from agentenv.core.step_dict import SCORE_ADVICE, read_info, scalar
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import Completion, StepResult, StopReason, Task
from agentenv.errors import ContractError
from agentenv.interop.hosted import problem_of


def to_response(trajectory: Trajectory, segment_index: int | None = None) -> ResponseDict:
    """Return what OpenRLHF's trainer reads of an episode: every key, with the numbers of the last turn's info as logs.

    `truncated` is OpenRLHF's, which its stop-properly penalty reads: the token limit cut the last action.
    `rollout_log_probs` is None if a log-probability is missing: a gap is never filled with 0.0. With an index, the
    tokens are that segment's; reward, score and logs stay the whole episode's.

    Raises:
        ContractError: there are several segments and no index: the dict holds one sequence.
        DataError: the record has no token ids.
    """
    trajectory.check_tokens("to_response")
    if segment_index is None and len(trajectory.segments) > 1:
        raise ContractError(
            f"to_response: expected one segment, got {len(trajectory.segments)}. Use history='keep', or train on the "
            "trajectory itself."
        )
    segment = trajectory.segments[segment_index or 0]
    complete = not math.isnan(sum(segment.logprobs))  # fast: one NaN makes the sum NaN
    results = [turn.result for turn in trajectory.turns if turn.result is not None]
    info = results[-1].info if results else {}
    ranges = []  # what the policy chose: OpenRLHF trains on it, and not on tokens that a constraint forced
    for turn in trajectory.turns:
        if turn.segment == (segment_index or 0):
            edges = [turn.start - 1, *turn.forced_places, turn.end]
            ranges += [(before + 1, after) for before, after in pairwise(edges) if before + 1 < after]
    return {
        "prompt": trajectory.task.prompt,
        "label": trajectory.task.label,
        "observation_tokens": segment.token_ids.tolist(),
        "action_ranges": ranges,
        "rollout_log_probs": segment.logprobs.tolist() if complete else None,
        "reward": trajectory.reward,
        "scores": trajectory.reward if trajectory.score is None else trajectory.score,
        "truncated": bool(trajectory.turns) and trajectory.turns[-1].finish_reason == "length",
        "extra_logs": {key: float(value) for key, value in info.items() if not isinstance(value, str)},
        "images": list(trajectory.task.images) or None,
        "mm_train_inputs": None,
    }


LogRule = Literal["first", "last", "sum", "mean", "max"]
"""How the turns' values under one name become the episode's value."""
_RULES: dict[str, Callable[[list[float]], float]] = {
    "first": lambda values: values[0],
    "last": lambda values: values[-1],
    "sum": math.fsum,
    "mean": lambda values: math.fsum(values) / len(values),
    "max": max,
}
_RESERVED_NAMES = frozenset({
    "reward", "score", "return", "kl", "logprobs_diff", "group_reward_std", "response_clip_ratio", "response_length",
    "total_length", "policy_loss", "actor_lr", "actor_grad_norm", "entropy_loss", "aux_loss", "kl_loss", "ptx_loss",
    "ppo_clip_ratio", "ppo_kl", "vllm_kl", "is_filter_ratio", "critic_loss", "values", "critic_lr", "num_turns",
    "failed", "failed_alone",
})  # fmt: skip
"""Names of the trainer's metrics, which extra logs would overwrite, and of those that every episode has."""


def check_logs(logs: Mapping[str, Any], where: str) -> None:
    """Check the names and rules of `logs`.

    Raises:
        ContractError: a name belongs to the trainer, or a rule is not in `LogRule`; the message starts with `where`.
    """
    taken = sorted(set(logs) & _RESERVED_NAMES)
    unknown = {name: rule for name, rule in logs.items() if rule not in _RULES}
    if taken:
        raise ContractError(
            f"{where}.logs: expected names that the trainer does not use, got {', '.join(taken)}. Rename them."
        )
    if unknown:
        raise ContractError(
            f"{where}.logs: expected one of {', '.join(_RULES)} for each name, got {unknown}. Change the rule."
        )


def training_response(
    trajectory: Trajectory,
    *,
    logs: Mapping[str, LogRule],
    wants_logprobs: bool,
    terminator: int,
    failed_reward: float,
    segment_index: int | None = None,
) -> tuple[ResponseDict, str | None]:
    """Return the response that OpenRLHF can train on, and the problem as text, or None if there is none.

    A neutral sample replaces an episode that failed, because the group must keep its size: one action token, the first
    that was sampled, else the terminator, with `failed_reward`. It is not marked as truncated, which OpenRLHF may
    penalize.
    """
    response = to_response(trajectory, segment_index)
    problem = problem_of(trajectory)
    if problem is None and wants_logprobs and response["rollout_log_probs"] is None:
        problem = "the engine returned no log-probability for some of the tokens."
    if problem is not None:
        segment = trajectory.segments[0]
        ids = segment.token_ids.tolist()
        if trajectory.turns:
            start = trajectory.turns[0].start
            ids, logprob = ids[: start + 1], segment.logprobs[start]
        else:  # the engine or the environment failed before the first action: there is room for a token
            ids, logprob = [*(ids or [terminator]), terminator], 0.0
            start = len(ids) - 1
        response |= {
            "observation_tokens": ids,
            "action_ranges": [(start, start + 1)],
            "rollout_log_probs": [0.0] * start + [0.0 if math.isnan(logprob) else logprob],
            "reward": float(failed_reward),
            "scores": float(failed_reward),
            "truncated": False,
        }
    if not wants_logprobs:
        response["rollout_log_probs"] = None
    # The same names for every episode: OpenRLHF cannot build a batch if a sample lacks one.
    is_failed = float(problem is not None)
    totals = {"num_turns": float(len(trajectory.turns)), "failed": is_failed, "failed_alone": is_failed}
    infos = [turn.result.info for turn in trajectory.turns if turn.result is not None]
    for name, rule in logs.items():
        numbers = [float(value) for info in infos if isinstance(value := info.get(name), int | float)]
        totals[name] = _RULES[rule](numbers) if numbers else 0.0
    response["extra_logs"] = totals
    return response, problem


class SiblingRewards:
    """The rewards of the episodes of one prompt that run at the same time, of which a failed one gets the mean.

    Then the mean of its group is the one without it, and its own advantage under a baseline of the group is 0.
    """

    def __init__(self) -> None:
        self._num_running = 0
        self._are_over = asyncio.Event()
        self._known: list[tuple[float, float]] = []

    @contextmanager
    def running(self, *, on_last: Callable[[], Any]) -> Iterator[None]:
        """Count an episode as one that runs; call `on_last` as soon as none does."""
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            if not self._num_running:
                on_last()
                self._are_over.set()

    def add(self, trajectory: Trajectory) -> None:
        """Store the reward and the score of an episode, if it has a reward."""
        if (reward := trajectory.reward) is not None:
            self._known.append((reward, reward if trajectory.score is None else trajectory.score))

    async def replace_reward(self, response: ResponseDict) -> float | None:
        """Give a failed episode's response the mean reward and score of its siblings, once they are over.

        Returns the reward; None if no sibling has one, so that the response stays as it is.
        """
        await self._are_over.wait()
        if not self._known:
            return None
        rewards, scores = zip(*self._known, strict=True)
        response["reward"], response["scores"] = math.fsum(rewards) / len(rewards), math.fsum(scores) / len(scores)
        response["extra_logs"]["failed_alone"] = 0.0
        return response["reward"]


def merge_response(
    response: Mapping[str, Any], trajectory: Trajectory, told: tuple[float | None, float | None]
) -> bool:
    """Apply what an override of `execute` changed in an episode's own response, if the tokens are the same.

    The difference in reward goes to the last turn, like the score and the extra logs. `told` is the reward and the
    score that the override got: if it changes the reward alone, the score stays that one, as in OpenRLHF. Returns False
    if the tokens differ, so that the response is a separate record.
    """
    own = to_response(trajectory)
    if any(response.get(key) != own.get(key) for key in ("observation_tokens", "action_ranges")):
        return False
    last = trajectory.turns[-1].result if trajectory.turns else None
    if last is None or own["reward"] is None:
        return True  # a failed episode stays failed
    if response.get("reward", 0) is None:
        without_reward(trajectory)
        return True
    where = "AgentExecutor.execute"
    reward, score = scalar(response.get("reward"), f"{where}: reward"), response.get("scores")
    score = None if score is None else scalar(score, f"{where}: scores", SCORE_ADVICE)
    score = last.score if score is None or (reward, score) == told else score
    info = {**last.info, **read_info(response.get("extra_logs"), where)}
    trajectory.set_result(replace(last, reward=last.reward + (reward - own["reward"]), score=score, info=info))
    return True


def without_reward(trajectory: Trajectory) -> None:
    """Remove the last turn's result: its reward, and so the episode's, is unknown."""
    if trajectory.turns:
        last = trajectory.turns[-1]
        last.result, trajectory.segments[last.segment].rewards[last.end - 1] = None, 0.0


def from_response(response: Mapping[str, Any], task: Task, *, max_length: int, decode: Any) -> Trajectory:
    """Return the trajectory behind a response that a custom `execute` built itself.

    The dict has only the sum of the rewards, which goes to the last turn. If it is None, the last turn has no result.

    Raises:
        ContractError: a key is missing, or the action ranges do not fit the tokens.
    """
    where = "AgentExecutor.execute"
    missing = [key for key in ("observation_tokens", "action_ranges") if key not in response]
    if missing:
        raise ContractError(f"{where}: expected OpenRLHF's response dict, got one without {missing}. Add them.")
    try:
        trajectory = Trajectory(task, max_length)
        ids, ranges = list(response["observation_tokens"]), [tuple(span) for span in response["action_ranges"]]
        logprobs = response.get("rollout_log_probs")
        edges = [0, *(edge for span in ranges for edge in span), len(ids)]
        if edges != sorted(edges) or (logprobs is not None and len(logprobs) != len(ids)):
            raise ContractError(
                f"{where}: expected increasing action ranges and log-probabilities for {len(ids)} tokens, got {ranges} "
                f"and {None if logprobs is None else len(logprobs)}. Count both in tokens of observation_tokens."
            )
        trajectory.max_length = max(trajectory.max_length, len(ids))
        position, is_rewarded = 0, any(response.get(key) is not None for key in ("reward", "scores"))
        for index, (start, end) in enumerate(ranges):
            trajectory.append_observation(ids[position:start])
            span = None if logprobs is None else tuple(map(float, logprobs[start:end]))
            is_cut = bool(response.get("truncated")) and index + 1 == len(ranges)
            completion = Completion(tuple(ids[start:end]), logprobs=span, finish_reason="length" if is_cut else "stop")
            trajectory.append_turn(completion, decode(ids[start:end]))
            if is_rewarded or index + 1 < len(ranges):
                trajectory.set_result(StepResult())
            position = end
        trajectory.append_observation(ids[position:])
        if ranges and is_rewarded:  # OpenRLHF accepts None if a reward function is called later
            scores = response.get("scores")
            result = StepResult(
                reward=scalar(response.get("reward"), f"{where}: reward"),
                score=None if scores is None else scalar(scores, f"{where}: scores", SCORE_ADVICE),
                info=read_info(response.get("extra_logs"), where),
            )
            trajectory.set_result(result)
        trajectory.finish(StopReason.TRUNCATED_BY_ENV if response.get("truncated") else StopReason.TERMINATED)
        return trajectory
    except (ValueError, TypeError, OverflowError) as error:
        raise error if isinstance(error, ContractError) else ContractError(f"{where}: {error}") from error


class ResponseDict(TypedDict, total=False):
    """The keys that OpenRLHF's trainer reads of an episode (0.9.1 to 0.11.2).

    Source: openrlhf/trainer/ppo_utils/samples_generator.py, 0.11.2.
    """

    prompt: Any
    label: Any
    observation_tokens: list[int]
    """[T]"""
    action_ranges: list[tuple[int, int]]
    rollout_log_probs: list[float] | None
    """[T] 0.0 off the actions."""
    reward: float | None
    scores: float | None
    truncated: bool
    extra_logs: dict[str, float]
    images: Any
    mm_train_inputs: Any
