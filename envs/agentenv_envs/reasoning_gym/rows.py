"""Rows for `--data`: items of reasoning-gym's datasets, mixed by weight, with disjoint train and eval splits.

A row is `{"prompt": [message], "label": JSON of the item, "id", "dataset", "level", "source"}`. The row contains the
item, which is never generated again, because some datasets generate another one in another process.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

from agentenv._util.suggest import did_you_mean
from agentenv.errors import ConfigError, DataError
from agentenv_envs.common import check
from agentenv_envs.reasoning_gym.data_only import BY_TASK_ID, CHANCE, SCORED_BY_CONFIG
from agentenv_envs.reasoning_gym.reward import INSTRUCTIONS, require_reasoning_gym

Split = Literal["train", "eval", "all"]
SPLITS = ("train", "eval", "all")
EVAL_SHARE = 0.1
"""Share of all possible questions. It is fixed: with two values, files of different splits could share a question."""
_TRIES_PER_ROW = 60
_LICENSE = "Apache-2.0"


@dataclass(frozen=True, slots=True)
class Mixture:
    """The rows to generate."""

    weights: Mapping[str, float]
    """Datasets and their shares of the rows."""
    size: int = 500
    """Total number of rows."""
    seed: int = 0
    split: Split = "train"
    """train and eval share no question, with any seeds; `all` is both."""
    level: int | None = None
    """Difficulty in the datasets' own curricula, from 0; those with fewer levels use their highest; None: defaults."""
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings of a dataset, by its name; they take precedence over the level's."""
    instruction: str = INSTRUCTIONS["auto"]
    """Text below every question; empty for none."""
    max_chance: float = 0.66
    """Refuse datasets of which one constant answer solves a larger share."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: a value is invalid; the message names the field.
        """
        checks = (
            ("weights", self.weights, bool(self.weights) and all(w > 0 for w in self.weights.values()), "weights > 0"),
            ("size", self.size, self.size >= len(self.weights), f"at least {len(self.weights)}, one for each dataset"),
            ("split", self.split, self.split in SPLITS, f"one of {', '.join(SPLITS)}"),
            ("level", self.level, self.level is None or self.level >= 0, "None or an integer >= 0"),
            ("config", dict(self.configs), set(self.configs) <= set(self.weights), f"among {', '.join(self.weights)}"),
        )
        for name, value, holds, expected in checks:
            check(f"reasoning_gym.{name}", value, holds, expected)
        for name in self.weights:
            if CHANCE.get(name, 0.0) > self.max_chance:
                raise ConfigError(
                    "reasoning_gym.datasets: expected datasets of which no constant answer solves more than "
                    f"{self.max_chance:.0%}, got {name} ({CHANCE[name]:.0%}). Exclude it, or raise --max_chance."
                )


def dataset_names() -> dict[str, list[str]]:
    """Return the names of all datasets by category, without `composite`.

    Raises:
        MissingDependency: reasoning-gym is not installed.
    """
    require_reasoning_gym()
    from reasoning_gym.factory import DATASETS

    names: dict[str, list[str]] = {}
    for name, (cls, _) in sorted(DATASETS.items()):
        if name != "composite":
            names.setdefault(cls.__module__.split(".")[1], []).append(name)
    return names


def num_levels(name: str) -> int:
    """Return the number of levels of the dataset's curriculum; 0 if it has none."""
    from reasoning_gym.factory import CURRICULA

    curriculum: Any = CURRICULA.get(name)
    attributes = curriculum().attributes.values() if curriculum else ()
    return max((len(attribute.levels) for attribute in attributes), default=0)


def make_rows(mixture: Mixture) -> Iterator[dict[str, Any]]:
    """Yield the rows, in an order by the seed; no question occurs twice.

    Raises:
        ConfigError: a dataset is unknown, or refuses its settings or the level.
        DataError: a dataset does not have that many different questions.
        MissingDependency: reasoning-gym is not installed.
    """
    source = f"reasoning-gym {require_reasoning_gym()} ({_LICENSE})"
    rows: list[dict[str, Any]] = []
    # At least one row of each dataset, the rest by weight, largest remainders first.
    total, left = sum(mixture.weights.values()), mixture.size - len(mixture.weights)
    exact = {name: left * weight / total for name, weight in mixture.weights.items()}
    counts = {name: 1 + int(share) for name, share in exact.items()}
    behind = sorted(exact, key=lambda name: int(exact[name]) - exact[name])
    for name in behind[: mixture.size - sum(counts.values())]:
        counts[name] += 1
    for name, count in counts.items():
        for number, item in enumerate(_items(name, count, mixture)):
            identity = f"{name}-{mixture.split}-{mixture.seed}-{number}"
            question = f"{item['question']}\n\n{mixture.instruction}" if mixture.instruction else item["question"]
            rows.append(
                {
                    "id": identity if mixture.level is None else f"{identity}-level{mixture.level}",
                    "prompt": [{"role": "user", "content": question}],
                    "label": json.dumps(item, default=str, ensure_ascii=False),
                    "dataset": str(item["metadata"]["source_dataset"]),
                    "level": mixture.level,
                    "source": source,
                }
            )
    random.Random(hash64(mixture.seed, mixture.split, "order")).shuffle(rows)
    yield from rows


def hash64(*parts: object) -> int:
    """Return 64 bits that are equal in every process; similar arguments have unrelated results."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


def split_of(item: Mapping[str, Any]) -> Split:
    """Return the split of an item, by its question alone: independent of seed, size and order.

    Variations of one ARC puzzle are in the same split.
    """
    metadata = item["metadata"]
    name = metadata["source_dataset"]
    key = metadata["task_id"] if name in BY_TASK_ID else item["question"]
    return "eval" if hash64("split", name, key) < EVAL_SHARE * 2**64 else "train"


def _items(name: str, count: int, mixture: Mixture) -> Iterator[dict[str, Any]]:
    dataset, config = _dataset(name, count, mixture)
    seen: set[str] = set()
    for index in range(_num_tries(count)):
        with _quietly():
            item = dataset[index]
        if item["question"] in seen or mixture.split not in ("all", split_of(item)):
            continue
        seen.add(item["question"])
        yield {**item, "config": config} if config else item
        if len(seen) == count:
            return
    raise DataError(
        f"reasoning_gym.{name}: expected {count} different questions of the split {mixture.split}, got {len(seen)} in "
        f"{_num_tries(count)} tries. Ask for fewer, or for another level."
    )


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Suppress the datasets' output, and warnings about files that one leaves open."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _num_tries(count: int) -> int:
    """Return the most items to generate for so many rows: for split eval, nine of ten belong to the other split."""
    return _TRIES_PER_ROW * (count + 10)


def _dataset(name: str, count: int, mixture: Mixture) -> tuple[Any, dict[str, Any]]:
    """Return the dataset, and the non-default settings that its scorer needs."""
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS, create_curriculum, create_dataset

    custom = dict(mixture.configs.get(name, {}))
    if name not in DATASETS:
        groups = dataset_names()
        known = [*groups, "all", "composite", *(other for names in groups.values() for other in names)]
        raise ConfigError(
            f"reasoning_gym.datasets: expected a dataset, a category, all or composite, got {name!r}."
            f"{did_you_mean(name, known)} --list shows all."
        )
    settings: dict[str, Any] = {}
    if mixture.level is not None and (most := num_levels(name)):  # of the level, or of the highest one
        curriculum: Any = create_curriculum(name)
        curriculum.set_global_level(min(mixture.level, most - 1))
        config = curriculum.generate_configuration({})
        default = type(config)()
        changed = {key: getattr(config, key) for key in type(config).__dataclass_fields__}
        settings = {key: value for key, value in changed.items() if value != getattr(default, key)}
    # At most 31 bits: one dataset refuses larger seeds.
    settings |= {**custom, "seed": hash64(mixture.seed, mixture.split, name) >> 33}
    try:
        arguments = {"size": _num_tries(count), **settings}
        if name == "composite":
            parts = settings.get("datasets") or ()
            arguments["datasets"] = [DatasetSpec(**{"weight": 1.0, "config": {}, **part}) for part in parts]
        with _quietly():
            dataset = create_dataset(name, **arguments)
    except (AssertionError, TypeError, ValueError, KeyError) as error:
        fields = [field for field in DATASETS[name][1].__dataclass_fields__ if field not in ("seed", "size")]
        # pytest adds lines to the failed asserts of modules that it rewrites.
        why = str(error).partition("\n")[0]
        raise ConfigError(
            f"reasoning_gym.config: expected settings of {name} ({', '.join(fields)}) that fit together, got {custom!r}"
            f"{'' if mixture.level is None else f' at level {mixture.level}'}: {why}. Change them, or exclude it "
            f"(all,-{name})."
        ) from error
    stored = {key: value for key, value in settings.items() if key != "seed"} if name in SCORED_BY_CONFIG else {}
    return dataset, stored
