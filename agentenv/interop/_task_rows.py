"""Tasks as rows of a parquet file, in the columns that verl and SkyRL read: each row holds its whole task as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from agentenv.core.dataset import in_messages, read_tasks
from agentenv.core.types import Task
from agentenv.errors import DataError, MissingDependency

_TASK = "agentenv_task"
"""The key of `extra_info` that has our task as JSON: a parquet column has one type, and labels have any."""


def task_dataset(rows: Sequence[Mapping[str, Any] | Task], where: str, data_source: str) -> Any:
    """Return a `datasets.Dataset` of tasks, for `to_parquet`; errors start with `where`.

    Raises:
        MissingDependency: `datasets` is not installed.
        DataError: a row is not a task, has images, or is not JSON.
    """
    try:
        from datasets import Dataset
    except ImportError as error:
        raise MissingDependency(f"{where}: expected datasets, got {error}. pip install 'agentenv-rl[data]'") from error
    tasks = [in_messages(task) for task in read_tasks(rows, needs_label=False)]
    return Dataset.from_list([_row(task, index, where, data_source) for index, task in enumerate(tasks)])


def _row(task: Task, index: int, where: str, data_source: str) -> dict[str, Any]:
    messages = [message for message in task.prompt if not isinstance(message, str)]
    try:
        text = json.dumps(asdict(task) | {"images": list(task.images)}, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: expected JSON in task {task.task_id!r}, got {error}. Change the row.") from error
    if task.images:
        raise DataError(f"{where}: expected a task without images, got {task.task_id!r}. Remove the row.")
    return {
        "prompt": [{"role": str(each["role"]), "content": str(each.get("content") or "")} for each in messages],
        "data_source": data_source,
        "reward_model": {"style": "rule", "ground_truth": json.dumps(task.label)},
        "extra_info": {"index": index, _TASK: text},
    }


def task_of(prompt: Sequence[Any], columns: Mapping[str, Any], task_id: str) -> Task:
    """Return the task of a row: the one that `task_dataset` wrote, or one of the trainer's own columns.

    Args:
        prompt: the row's messages.
        columns: its other columns; `reward_model` or `reward_spec` has the label, `extra_info` the metadata.
        task_id: the id of a row that `task_dataset` did not write.
    """
    extra_info = dict(columns.get("extra_info") or {})
    if _TASK in extra_info:
        return Task(**{**json.loads(extra_info[_TASK]), "images": ()})
    label = (columns.get("reward_model") or columns.get("reward_spec") or {}).get("ground_truth")
    return Task(list(prompt), label=label, task_id=task_id, metadata=extra_info)
