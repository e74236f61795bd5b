"""Batches of a vector environment's inputs and outputs, in the forms of Gymnasium's own vector code."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentenv.errors import ContractError

Info = dict[str, Any]

BY_ENV = "by_env"
"""Key of a batch of infos that holds each environment's info unchanged."""

_EXACT = 2**53
"""float64 represents every integer up to this one exactly."""


def batch_infos(infos: Sequence[Mapping[str, Any] | None]) -> Info:
    """Merge one info per environment into one dict of arrays, in the form that Gymnasium's wrappers read.

    Each key maps to an array [n]; `_key` maps to a bool array [n] that marks the environments that have the key.
    Numbers become float64 (NaN if missing), bools bool, nested dicts nested batches; everything else (text, lists,
    token ids, arrays of any shape) becomes an object array (None if missing). `by_env` holds the infos unchanged.
    """
    batch = _columns(infos)
    has = np.array([info is not None for info in infos], dtype=np.bool_)
    if has.any():
        batch[BY_ENV], batch[f"_{BY_ENV}"] = objects(infos), has
    return batch


def objects(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Return an object array [n] of these values, also if they are sequences of equal length."""
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
    """Return the values [n] in the one form that fits all values that `has` marks."""
    present = [value for value, is_present in zip(values, has, strict=True) if is_present]
    if all(isinstance(value, Mapping) for value in present):
        return _columns(values)
    if all(isinstance(value, bool | np.bool_) for value in present):
        flags = np.zeros(len(has), dtype=np.bool_)
        flags[has] = present
        return flags
    if all(_is_number(value) for value in present):
        numbers = np.full(len(has), np.nan, dtype=np.float64)
        numbers[has] = present
        return numbers
    return objects(values)


def _is_number(value: Any) -> bool:
    if isinstance(value, int | np.integer):
        return abs(int(value)) <= _EXACT  # a seed of 64 bits would become another one
    return isinstance(value, float | np.floating | np.bool_)


def seed_list(seed: Any, num_envs: int) -> list[int | None]:
    """Return a seed per environment: None for all, `seed + index`, or the list itself.

    Raises:
        ContractError: `seed` is a list of another length or not made of integers.
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
            f"reset: seed: expected one per environment ({num_envs}), got {len(seeds)}. Pass that many, or one integer."
        )
    return seeds


def _integers(seed: Any) -> int | list[int | None]:
    if isinstance(seed, str | bytes | Mapping):  # these are iterable too
        raise TypeError("expected an integer or a list of integers")
    try:
        return operator.index(seed)
    except TypeError:
        return [None if one is None else operator.index(one) for one in seed]


def reset_mask(mask: Any, num_envs: int) -> np.ndarray[Any, Any]:
    """Return the mask [n] of environments to reset; None selects all of them.

    Raises:
        ContractError: the mask is not a bool array of that shape, or selects no environment.
    """
    if mask is None:
        return np.ones(num_envs, dtype=np.bool_)
    fits = isinstance(mask, np.ndarray) and mask.shape == (num_envs,) and mask.dtype == np.bool_
    if not fits or not mask.any():
        raise ContractError(
            f"reset: options['reset_mask']: expected a bool array of shape ({num_envs},) with at least one True, "
            f"got {mask!r:.200}. Pass `terminations | truncations`."
        )
    return np.array(mask)


def task_list(task: Any, num_envs: int) -> list[int | str | None]:
    """Return a task per environment: one name for all, or the list itself.

    Raises:
        ContractError: the list has another length.
    """
    if not isinstance(task, list | tuple | np.ndarray):
        return [task] * num_envs
    if len(task) != num_envs:
        raise ContractError(
            f"reset: options['task']: expected one per environment ({num_envs}), got {len(task)}. Pass that many."
        )
    return list(task)


def action_list(actions: Any, num_envs: int) -> list[Any]:
    """Return one action per environment, in order.

    Raises:
        ContractError: the number of actions differs, or `actions` is not a sequence of actions (a text is not).
    """
    try:
        listed = None if isinstance(actions, str | bytes | Mapping) else list(actions)
    except TypeError:
        listed = None
    if listed is None:
        raise ContractError(f"step: actions: expected one per environment, got {actions!r:.100}. Pass a sequence.")
    if len(listed) != num_envs:
        raise ContractError(
            f"step: actions: expected one per environment ({num_envs}), got {len(listed)}. Pass that many."
        )
    return listed
