"""OpenRLHF's dicts to and from our types: the only home of its key names.

Source: openrlhf/utils/agent.py and trainer/ppo_utils/samples_generator.py, 0.9.1 to 0.11.2.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from agentenv.agent import ResponseDict
from agentenv.errors import ContractError
from agentenv.trajectory import Trajectory
from agentenv.types import Completion, SamplingParams, StepResult, StopReason, Task

REQUIRED_STEP_KEYS = ("rewards", "environment_feedback", "done")


def parse_step(value: Any, where: str) -> StepResult:
    """A step's return value as a StepResult: one is passed through, OpenRLHF's dict is read.

    `done` without `truncated` means terminated. A missing `scores` stays None.

    Raises:
        ContractError: neither of the two, a key lacks, or a value is not what the contract says; names `where`.
    """
    if isinstance(value, StepResult):
        text_or_messages(value.observation, f"{where}: observation")
        sampling = to_sampling(value.sampling, where)
        return value if sampling is value.sampling else replace(value, sampling=sampling)
    if not isinstance(value, Mapping):
        raise ContractError(
            f"{where}: expected a StepResult or OpenRLHF's dict, got {type(value).__name__}. "
            "Return StepResult(observation, reward=…, terminated=…)."
        )
    missing = [key for key in REQUIRED_STEP_KEYS if key not in value]
    if missing:
        raise ContractError(
            f"{where}: expected the keys {list(REQUIRED_STEP_KEYS)}, got {sorted(map(str, value))}. "
            f"Add {missing}, or return StepResult(…)."
        )
    scores = value.get("scores")
    try:
        done, truncated = _flag(value["done"], f"{where}: done"), _flag(value.get("truncated"), f"{where}: truncated")
        return StepResult(
            observation=text_or_messages(value["environment_feedback"], f"{where}: environment_feedback"),
            reward=scalar(value["rewards"], f"{where}: rewards"),
            terminated=done and not truncated,
            truncated=truncated,
            score=None if scores is None else scalar(scores, f"{where}: scores", SCORE_ADVICE),
            info=_info(value.get("extra_logs"), where),
            sampling=to_sampling(value.get("sampling_params"), where),
            images=tuple(value.get("environment_images") or ()),
        )
    except (ValueError, TypeError) as error:
        raise error if isinstance(error, ContractError) else ContractError(f"{where}: {error}") from error


_REWARD_ADVICE = "Return a number or a tensor of one element; raise InfraError where no value can be had."
SCORE_ADVICE = "Leave it out where there is none."


def scalar(value: Any, where: str, advice: str = _REWARD_ADVICE) -> float:
    """A number, or the one element of a tensor, array or list, as a float; `advice` is for what is none.

    Raises:
        ContractError: it is not one finite number.
    """
    if type(value) is float and math.isfinite(value):  # most are
        return value
    if hasattr(value, "reshape") and hasattr(value, "tolist"):
        value = value.tolist() if getattr(value, "ndim", 1) == 0 else value.reshape(-1).tolist()
    while isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 1:
        value = value[0]
    if not isinstance(value, (int, float)) and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise ContractError(f"{where}: expected one finite number, got {value!r:.200}. {advice}")
    return float(value)


def text_or_messages(value: Any, where: str) -> Any:
    """An observation, as it is.

    Raises:
        ContractError: it is neither text nor a list of messages.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and not isinstance(value, bytes) and all(isinstance(m, Mapping) for m in value):
        for message in value:
            role, content = message.get("role"), message.get("content")
            is_text = isinstance(content, (str, type(None)))
            is_parts = isinstance(content, (list, tuple)) and all(isinstance(part, Mapping) for part in content)
            if not isinstance(role, str) or not (is_text or is_parts):
                raise ContractError(
                    f"{where}: expected messages with a role and content of text or parts, got {dict(message)!r:.200}. "
                    "Write {'role': 'user', 'content': 'text'}."
                )
        return value
    raise ContractError(f"{where}: expected text or messages, got {type(value).__name__}. Return '' for none.")


def _flag(value: Any, where: str) -> bool:
    return value is not None and bool(scalar(value, where, "Return True or False."))


def _info(logs: Any, where: str) -> dict[str, float | str]:
    if logs is None:
        return {}
    if not isinstance(logs, Mapping):
        raise ContractError(f"{where}: extra_logs: expected a dict of numbers, got {type(logs).__name__}. Mend it.")
    return {
        str(key): value if isinstance(value, str) else scalar(value, f"{where}: extra_logs[{key!r}]", "Leave it out.")
        for key, value in logs.items()
    }


_NOT_TAKEN = {
    "n": 1, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "bad_words": None,
    "logit_bias": None, "allowed_token_ids": None, "structured_outputs": None, "guided_decoding": None,
}  # fmt: skip
"""Fields of vLLM's SamplingParams that would be lost, and their values when unset."""


def to_sampling(value: Any, where: str = "sampling_params") -> SamplingParams | None:
    """SamplingParams of ours or of vLLM as ours; None stays None.

    Raises:
        ContractError: it is neither; nothing is put in the place of what it may have meant.
    """
    if value is None or isinstance(value, SamplingParams):
        return value
    if not hasattr(value, "temperature"):
        raise ContractError(
            f"{where}: sampling_params: expected SamplingParams, got {type(value).__name__}. "
            "Return the ones in states['sampling_params'], changed with dataclasses.replace."
        )
    lost = {
        name: found for name, unset in _NOT_TAKEN.items() if (found := getattr(value, name, None) or unset) != unset
    }
    if lost:
        raise ContractError(
            f"{where}: sampling_params: expected only what agentenv samples with, got {lost}. Leave these unset."
        )
    stop = getattr(value, "stop", None) or ()
    return SamplingParams(
        temperature=float(getattr(value, "temperature", 1.0)),
        top_p=float(getattr(value, "top_p", 1.0)),
        top_k=max(int(getattr(value, "top_k", 0)), 0),
        min_p=float(getattr(value, "min_p", 0.0)),
        max_tokens=getattr(value, "max_tokens", None),
        min_tokens=int(getattr(value, "min_tokens", 0) or 0),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(getattr(value, "stop_token_ids", None) or ()),
        seed=getattr(value, "seed", None),
    )


def to_response(trajectory: Trajectory, segment_index: int | None = None) -> ResponseDict:
    """What OpenRLHF's trainer reads of an episode, every key present; numbers of the last turn's info as extra_logs.

    `rollout_log_probs` is None when a log-probability is missing: it is never filled with 0.0. With an index the tokens
    are those of that segment; reward, score and logs stay the whole episode's.

    Raises:
        ContractError: there are several segments and no index: the dict holds one sequence.
    """
    if segment_index is None and len(trajectory.segments) > 1:
        raise ContractError(
            f"to_response: expected one segment, got {len(trajectory.segments)}. Use history='keep', or train on the "
            "trajectory itself."
        )
    segment = trajectory.segments[segment_index or 0]
    complete = not math.isnan(sum(segment.logprobs))  # at the speed of C: one NaN makes the sum NaN
    results = [turn.result for turn in trajectory.turns if turn.result is not None]
    info = results[-1].info if results else {}
    return {
        "prompt": trajectory.task.prompt,
        "label": trajectory.task.label,
        "observation_tokens": segment.token_ids.tolist(),
        "action_ranges": [(t.start, t.end) for t in trajectory.turns if t.segment == (segment_index or 0)],
        "rollout_log_probs": segment.logprobs.tolist() if complete else None,
        "reward": trajectory.reward,
        "scores": trajectory.reward if trajectory.score is None else trajectory.score,
        "truncated": trajectory.truncated,
        "extra_logs": {key: float(value) for key, value in info.items() if not isinstance(value, str)},
        "images": list(trajectory.task.images) or None,
        "mm_train_inputs": None,
    }


LogRule = Literal["first", "last", "sum", "mean", "max"]
"""How the values that the turns give under one name become the episode's."""
_RULES: dict[str, Callable[[list[float]], float]] = {
    "first": lambda values: values[0],
    "last": lambda values: values[-1],
    "sum": math.fsum,
    "mean": lambda values: math.fsum(values) / len(values),
    "max": max,
}
_TRAINERS_NAMES = frozenset({
    "reward", "score", "return", "kl", "logprobs_diff", "group_reward_std", "response_clip_ratio", "response_length",
    "total_length", "policy_loss", "actor_lr", "actor_grad_norm", "entropy_loss", "aux_loss", "kl_loss", "ptx_loss",
    "ppo_clip_ratio", "ppo_kl", "vllm_kl", "is_filter_ratio", "critic_loss", "values", "critic_lr", "num_turns",
    "failed",
})  # fmt: skip
"""Names of the trainer's own metrics, which extra logs would overwrite, and of those that every episode has."""


def check_logs(logs: Mapping[str, Any], where: str) -> None:
    """Refuse what no log can be.

    Raises:
        ContractError: a name is the trainer's own, or a rule is not one of `LogRule`; names `where`.
    """
    taken = sorted(set(logs) & _TRAINERS_NAMES)
    unknown = {name: rule for name, rule in logs.items() if rule not in _RULES}
    if taken or unknown:
        raise ContractError(
            f"{where}.logs: expected names that are not the trainer's own, each with one of {', '.join(_RULES)}, got "
            f"{taken or unknown}. Rename them."
        )


def training_response(
    trajectory: Trajectory,
    *,
    logs: Mapping[str, LogRule],
    wants_logprobs: bool,
    neutral: NeutralSample,
    segment_index: int | None = None,
) -> tuple[ResponseDict, str | None]:
    """The response that OpenRLHF can train on, and what stood in its way, as text; None where nothing did.

    The neutral sample stands for an episode that failed.
    """
    response = to_response(trajectory, segment_index)
    problem = _problem(trajectory, response, wants_logprobs=wants_logprobs)
    if problem is not None:
        response = {**response, **_neutral(trajectory, neutral)}
    if not wants_logprobs:
        response["rollout_log_probs"] = None
    response["extra_logs"] = _fixed_logs(trajectory, logs, failed=problem is not None)
    return response, problem


def with_items(response: ResponseDict) -> None:
    """Give the logs' numbers the method `item`, which OpenRLHF's trainer of 0.8.7 to 0.9.0 calls."""
    import numpy as np

    response["extra_logs"] = {name: np.float64(value) for name, value in response["extra_logs"].items()}


def _problem(trajectory: Trajectory, response: ResponseDict, *, wants_logprobs: bool) -> str | None:
    if response["reward"] is None:
        error = trajectory.error
        return f"{error.where}: {error.type}: {error.message}" if error else f"it ended as {trajectory.stop_reason}."
    if wants_logprobs and response["rollout_log_probs"] is None:
        return "the engine gave no log-probability for some of the tokens."
    return None


@dataclass(frozen=True, slots=True)
class NeutralSample:
    """What stands for a failed episode where a group must keep its size: one action token, with this reward.

    The token is the first that was sampled, or else the terminator. It is not marked as truncated, for which OpenRLHF
    may give a penalty.
    """

    terminator: int
    reward: float = 0.0


def _neutral(trajectory: Trajectory, neutral: NeutralSample) -> ResponseDict:
    segment, turns = trajectory.segments[0], trajectory.turns
    ids = segment.token_ids.tolist()
    if turns:
        start, logprob = turns[0].start, segment.logprobs[turns[0].start]
        ids = ids[: start + 1]
    else:  # the engine or the environment failed before the first action; room for a token is there, or nothing at all
        ids, logprob = [*(ids or [neutral.terminator]), neutral.terminator], 0.0
        start = len(ids) - 1
    return {
        "observation_tokens": ids,
        "action_ranges": [(start, start + 1)],
        "rollout_log_probs": [0.0] * start + [0.0 if math.isnan(logprob) else logprob],
        "reward": float(neutral.reward),
        "scores": float(neutral.reward),
        "truncated": False,
    }


def _fixed_logs(trajectory: Trajectory, logs: Mapping[str, LogRule], *, failed: bool) -> dict[str, float]:
    """The same names for every episode, whatever became of it: OpenRLHF's batches break where a sample lacks one."""
    infos = [turn.result.info for turn in trajectory.turns if turn.result is not None]
    found = {name: [float(info[name]) for info in infos if _is_number(info.get(name))] for name in logs}
    made = {name: _RULES[logs[name]](values) if values else 0.0 for name, values in found.items()}
    return {"num_turns": float(len(trajectory.turns)), "failed": float(failed), **made}


def _is_number(value: Any) -> bool:
    return value is not None and not isinstance(value, str)


def merge_response(response: Mapping[str, Any], trajectory: Trajectory) -> bool:
    """Take over what an override of `execute` changed in an episode's own response, where the tokens are the same.

    The difference in reward goes to the last turn, like the score and the extra logs; everything else is kept. False
    where the tokens are others, so that the response is a record of its own.
    """
    own = to_response(trajectory)
    if any(response.get(key) != own.get(key) for key in ("observation_tokens", "action_ranges")):
        return False
    last = trajectory.turns[-1].result if trajectory.turns else None
    if last is None or own["reward"] is None:
        return True  # a failed episode stays one, whatever it is given
    if response.get("reward", 0) is None:
        without_reward(trajectory)
        return True
    where = "AgentExecutor.execute"
    added = scalar(response.get("reward"), f"{where}: reward") - own["reward"]
    score = response.get("scores")
    score = last.score if score is None or score == own["scores"] else scalar(score, f"{where}: scores")
    info = {**last.info, **_info(response.get("extra_logs"), where)}
    trajectory.set_result(replace(last, reward=last.reward + added, score=score, info=info))
    return True


def without_reward(trajectory: Trajectory) -> None:
    """Take the last turn's result away: its reward, and so the episode's, is unknown."""
    if trajectory.turns:
        last = trajectory.turns[-1]
        last.result, trajectory.segments[last.segment].rewards[last.end - 1] = None, 0.0


def from_response(response: Mapping[str, Any], task: Task, *, max_length: int, decode: Any) -> Trajectory:
    """The trajectory behind a response that a custom `execute` made itself.

    The dict keeps only the sum of the rewards, so it stands on the last turn; that has no result where it is None.

    Raises:
        ContractError: a key lacks, or the action ranges do not fit the tokens.
    """
    where = "AgentExecutor.execute"
    missing = [key for key in ("observation_tokens", "action_ranges") if key not in response]
    if missing:
        raise ContractError(f"{where}: expected OpenRLHF's response dict, got one without {missing}. Add them.")
    try:
        return _from_response(response, Trajectory(task, max_length), decode, where)
    except (ValueError, TypeError, OverflowError) as error:
        raise error if isinstance(error, ContractError) else ContractError(f"{where}: {error}") from error


def _from_response(response: Mapping[str, Any], trajectory: Trajectory, decode: Any, where: str) -> Trajectory:
    ids, ranges = list(response["observation_tokens"]), [tuple(span) for span in response["action_ranges"]]
    logprobs = response.get("rollout_log_probs")
    edges = [0, *(edge for span in ranges for edge in span), len(ids)]
    if edges != sorted(edges) or (logprobs is not None and len(logprobs) != len(ids)):
        raise ContractError(
            f"{where}: expected increasing action ranges and log-probabilities for {len(ids)} tokens, got {ranges} and "
            f"{None if logprobs is None else len(logprobs)}. Count both in tokens of observation_tokens."
        )
    trajectory.max_length = max(trajectory.max_length, len(ids))
    position, is_rewarded = 0, any(response.get(key) is not None for key in ("reward", "scores"))
    for index, (start, end) in enumerate(ranges):
        trajectory.append_observation(ids[position:start])
        span = None if logprobs is None else tuple(map(float, logprobs[start:end]))
        trajectory.append_turn(Completion(tuple(ids[start:end]), logprobs=span), decode(ids[start:end]))
        if is_rewarded or index + 1 < len(ranges):
            trajectory.set_result(StepResult())
        position = end
    trajectory.append_observation(ids[position:])
    if ranges and is_rewarded:  # OpenRLHF takes None where a reward function of its own is asked later
        trajectory.set_result(_final_result(response, where))
    trajectory.finish(StopReason.TRUNCATED_BY_ENV if response.get("truncated") else StopReason.TERMINATED)
    return trajectory


def _final_result(response: Mapping[str, Any], where: str) -> StepResult:
    scores = response.get("scores")
    return StepResult(
        reward=scalar(response.get("reward"), f"{where}: reward"),
        score=None if scores is None else scalar(scores, f"{where}: scores", SCORE_ADVICE),
        info=_info(response.get("extra_logs"), where),
    )
