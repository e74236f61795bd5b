"""What OpenRLHF asks a reward function or a reward model, and how it answers.

Source: openrlhf/utils/agent.py, SingleTurnAgentExecutor, 0.9.1 to 0.11.2; utils/remote_rm_utils.py, 0.8.9 to 0.9.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentenv.core.step_dict import SCORE_ADVICE, scalar
from agentenv.core.types import StepResult
from agentenv.errors import ContractError

_LOG_ADVICE = "Return a number, or one per query; leave it out where there is none."


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer to judge."""

    query: str
    """Prompt and answer as the model saw and wrote them: decoded with all special tokens, the terminator too."""
    prompt: str
    """The prompt alone, decoded with its template's tokens; `query` begins with it."""
    label: Any
    """As it is in the data."""


Outcome = StepResult | ContractError
"""The reward, score and logs of one sample, or the error in them."""


def read_rewards(answer: Any, num: int, where: str) -> list[Outcome]:
    """Return the results of a reward function for `num` samples, sample by sample.

    `rewards`, alone or in a dict, and `scores`, by default the rewards, are tensors, arrays or lists of shape [num] or
    [num, 1], or one number where num is 1. Each of `extra_logs` is such a list, or one value that holds for all.

    Raises:
        ContractError: a key is missing, or a list has another length; names `where`.
    """
    fields = answer if isinstance(answer, Mapping) else {"rewards": answer}
    if "rewards" not in fields:
        raise ContractError(
            f"{where}: expected the key 'rewards', got {sorted(map(str, fields))}. "
            "Return {'rewards': …, 'scores': …, 'extra_logs': {…}}."
        )
    rewards = _column(fields["rewards"], num, f"{where}: rewards")
    scores = fields.get("scores")
    scores = rewards if scores is None else _column(scores, num, f"{where}: scores")
    logs = fields.get("extra_logs")
    if not isinstance(logs, Mapping | None):
        raise ContractError(f"{where}: extra_logs: expected a dict of numbers, got {type(logs).__name__}.")
    columns = {
        str(name): _column(value, num, f"{where}: extra_logs[{name!r}]", one_for_all=True)
        for name, value in (logs or {}).items()
    }
    outcomes: list[Outcome] = []
    for index in range(num):
        logs_of_one = {name: column[index] for name, column in columns.items()}
        try:
            reward = scalar(rewards[index], f"{where}: rewards")
            score = scalar(scores[index], f"{where}: scores", SCORE_ADVICE)
            info = {
                name: value if isinstance(value, str) else scalar(value, f"{where}: extra_logs[{name!r}]", _LOG_ADVICE)
                for name, value in logs_of_one.items()
            }
            outcomes.append(StepResult(reward=reward, score=score, info=info))
        except ContractError as error:
            outcomes.append(error if str(error).startswith(where) else ContractError(f"{where}: {error}"))
    return outcomes


def as_answer(
    rewards: Sequence[float | None], scores: Sequence[float | None], logs: Mapping[str, Sequence[float | None]]
) -> dict[str, Any]:
    """Return rewards, scores in [0, 1] and logs as float tensors of shape [number of queries].

    Raises:
        ContractError: a value is None; a reward function must raise an exception instead.
    """
    import torch

    columns = {"rewards": rewards, "scores": scores, **logs}
    for name, values in columns.items():
        if None in values:
            raise ContractError(f"reward_func: {name}: expected numbers, got {list(values)!r:.200}. Raise InfraError.")
    tensors = {name: torch.tensor([float(value or 0.0) for value in values]) for name, values in columns.items()}
    return {
        "rewards": tensors.pop("rewards"),
        "scores": tensors.pop("scores"),
        "extra_logs": tensors,
    }


def _column(value: Any, num: int, where: str, *, one_for_all: bool = False) -> Sequence[Any]:
    """Return `num` values, not yet checked."""
    rows = value
    if hasattr(value, "tolist"):  # a tensor or an array
        try:
            rows = value.tolist()
        except Exception as error:
            raise ContractError(
                f"{where}: expected a tensor or a list whose values can be read, got {type(value).__name__} "
                f"({type(error).__name__}: {error}). Return a dense tensor of one device."
            ) from error
    is_list = isinstance(rows, Sequence) and not isinstance(rows, str | bytes)
    if one_for_all and (not is_list or (len(rows) == 1)):
        return (rows if is_list else [rows]) * num
    if not is_list and num == 1:
        return [rows]
    if not is_list or len(rows) != num:
        got = f"{len(rows)}" if is_list else f"{rows!r:.200}"
        raise ContractError(
            f"{where}: expected {num} number{'s' * (num != 1)}, one per query, got {got}. "
            "Return a tensor or a list in the queries' order."
        )
    return list(rows)
