"""What a vector environment takes and gives in batches, in the forms that gymnasium's own vector code uses."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentenv.errors import ContractError

Info = dict[str, Any]

BY_ENV = "by_env"
"""Key under which a batch of infos has each environment's own info, as it was."""

_EXACT = 2**53
"""The largest integer up to which float64 holds every one."""


def batch_infos(infos: Sequence[Mapping[str, Any] | None]) -> Info:
    """One dict of arrays out of one info per environment, in the form that gymnasium's wrappers read.

    A key has an array [n], and under `_key` a bool array [n]: which environments have it. Numbers are float64, NaN
    where there is none, whichever environment speaks first; bools are bool, nested dicts are batched again, and all
    else (text, lists, token ids, arrays of any shape) is an object array, None where there is none. The infos
    themselves, unchanged, are the object array under `by_env`.
    """
    batch = _columns(infos)
    has = np.array([info is not None for info in infos], dtype=np.bool_)
    if has.any():
        batch[BY_ENV], batch[f"_{BY_ENV}"] = objects(infos), has
    return batch


def objects(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """[n] an object array of exactly these, even where they are sequences of one length."""
    column = np.full(len(values), None, dtype=object)
    for index, value in enumerate(values):
        column[index] = value
    return column


def _columns(infos: Sequence[Mapping[str, Any] | None]) -> Info:
    batch: Info = {}
    for key in dict.fromkeys(key for info in infos if info is not None for key in info):
        has = np.array([info is not None and key in info for info in infos], dtype=np.bool_)
        values = [None if info is None else info.get(key) for info in infos]
        batch[key], batch[f"_{key}"] = _column(values, has), has
    return batch


def _column(values: list[Any], has: np.ndarray[Any, Any]) -> Any:
    """Values [n] in the one form that fits those which `has` marks."""
    given = [value for value, there in zip(values, has, strict=True) if there]
    if all(isinstance(value, Mapping) for value in given):
        return _columns(values)
    if all(isinstance(value, bool | np.bool_) for value in given):
        flags = np.zeros(len(has), dtype=np.bool_)
        flags[has] = given
        return flags
    if all(_is_number(value) for value in given):
        numbers = np.full(len(has), np.nan, dtype=np.float64)
        numbers[has] = given
        return numbers
    return objects(values)


def _is_number(value: Any) -> bool:
    if isinstance(value, int | np.integer):
        return abs(int(value)) <= _EXACT  # a seed of 64 bits would become another one
    return isinstance(value, float | np.floating | np.bool_)


def seed_list(seed: Any, num_envs: int) -> list[int | None]:
    """A seed per environment: None for all, `seed + index`, or the list as it is.

    Raises:
        ContractError: a list of another length, or something that is no integer.
    """
    if seed is None:
        return [None] * num_envs
    try:
        seeds = _integers(seed)
    except TypeError as error:
        raise ContractError(
            f"reset: seed: expected an integer, or a list of {num_envs} integers or None, got {seed!r:.100}. Change it."
        ) from error
    if isinstance(seeds, int):
        return [seeds + index for index in range(num_envs)]
    if len(seeds) != num_envs:
        raise ContractError(
            f"reset: seed: expected one per environment ({num_envs}), got {len(seeds)}. Give as many, or one integer."
        )
    return seeds


def _integers(seed: Any) -> int | list[int | None]:
    if isinstance(seed, str | bytes | Mapping):  # which could be gone through, too
        raise TypeError("no integer, and no list of them")
    try:
        return operator.index(seed)
    except TypeError:
        return [None if one is None else operator.index(one) for one in seed]


def reset_mask(mask: Any, num_envs: int) -> np.ndarray[Any, Any]:
    """[n] which environments to reset: the mask, or all where it is None.

    Raises:
        ContractError: no bool array of that shape, or none of them.
    """
    if mask is None:
        return np.ones(num_envs, dtype=np.bool_)
    fits = isinstance(mask, np.ndarray) and mask.shape == (num_envs,) and mask.dtype == np.bool_
    if not fits or not mask.any():
        raise ContractError(
            f"reset: options['reset_mask']: expected a bool array of shape ({num_envs},) with at least one True, "
            f"got {mask!r:.200}. Give `terminations | truncations`."
        )
    return np.array(mask)


def task_list(task: Any, num_envs: int) -> list[int | str | None]:
    """A task per environment: one name for all, or a list as it is.

    Raises:
        ContractError: a list of another length.
    """
    if not isinstance(task, list | tuple | np.ndarray):
        return [task] * num_envs
    if len(task) != num_envs:
        raise ContractError(
            f"reset: options['task']: expected one per environment ({num_envs}), got {len(task)}. Give as many, or one."
        )
    return list(task)


def action_list(actions: Any, num_envs: int) -> list[Any]:
    """One action per environment, in order.

    Raises:
        ContractError: another number of them, or no sequence, such as one text.
    """
    try:
        listed = None if isinstance(actions, str | bytes | Mapping) else list(actions)
    except TypeError:
        listed = None
    if listed is None:
        raise ContractError(f"step: actions: expected one per environment, got {actions!r:.100}. Give a sequence.")
    if len(listed) != num_envs:
        raise ContractError(
            f"step: actions: expected one per environment ({num_envs}), got {len(listed)}. Give as many."
        )
    return listed
