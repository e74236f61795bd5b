"""TaskSource: the data that a command, a test or Gymnasium reads tasks from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv.core.dataset import read_tasks
from agentenv.core.types import Task
from agentenv.episode.registry import builtin_datasets
from agentenv.errors import ConfigError


@dataclass(frozen=True)
class TaskSource:
    """Where tasks come from."""

    data: str | None = None
    """Tasks: FILE.jsonl, FILE.parquet, a Hugging Face dataset id or a built-in name. Default: the environment's own.
    `train` takes its first whose name ends in _train, and word_problems_train if it has none."""
    split: str | None = None
    """Split of a Hugging Face dataset."""
    prompt_key: str = "prompt"
    """Column with the prompt: text or chat messages."""
    label_key: str = "label"
    """Column with the label that the environment grades against."""

    def read(
        self,
        own: Mapping[str, str | Path],
        *,
        needs_label: bool = True,
        limit: int | None = None,
        rows: Iterable[Mapping[str, Any] | Task] | None = None,
    ) -> list[Task]:
        """Return the tasks.

        Args:
            own: the data that comes with the environment, by name; the first is the default.
            needs_label: whether a row without a label is an error; one without another `label_key` always is.
            limit: maximum number of tasks, from the first.
            rows: what replaces the data.

        Raises:
            ConfigError: there is no data.
            DataError: a row cannot be used.
        """
        paths = {name: Path(path) for name, path in own.items()}
        data = rows if rows is not None else self.data or next(iter(paths), None)
        # All classes are imported for their data only if it may be theirs.
        is_found = data in paths or Path(data).is_file() if isinstance(data, str) else rows is not None
        # A class in a file may bring data that is not installed.
        builtin = paths if is_found else builtin_datasets(data) | paths
        if data is None:
            raise ConfigError(
                "--data: expected tasks, got none. Add --data FILE.jsonl or a built-in name; write several "
                "environments, each with its `data`, to a YAML file, and name that as --env. "
                f"Built in are {', '.join(builtin)}."
            )
        keys = {"prompt_key": self.prompt_key, "label_key": self.label_key}
        return read_tasks(data, **keys, limit=limit, split=self.split, builtin=builtin, needs_label=needs_label)
