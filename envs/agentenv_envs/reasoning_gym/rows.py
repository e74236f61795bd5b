"""Rows for `--data`: items of reasoning-gym's datasets, mixed by weight, split so that train and eval never meet.

A row is `{"prompt": [message], "label": JSON of the item, "id", "dataset", "level", "source"}`: the item goes with the
row and is never made again, since some datasets make another one in another process.
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

from agentenv.errors import ConfigError, DataError
from agentenv.loading import nearest
from agentenv_envs.reasoning_gym.answers import INSTRUCTIONS
from agentenv_envs.reasoning_gym.hazards import BY_TASK_ID, CHANCE, SCORED_BY_CONFIG
from agentenv_envs.reasoning_gym.reward import require_reasoning_gym

Split = Literal["train", "eval", "all"]
SPLITS = ("train", "eval", "all")
EVAL_SHARE = 0.1
"""Of all questions that there can be. Not to be chosen: with two values, two files of different splits could meet."""
_TRIES_PER_ROW = 60
_LICENCE = "Apache-2.0"


@dataclass(frozen=True, slots=True)
class Mixture:
    """What rows to make."""

    weights: Mapping[str, float]
    """Datasets and their shares of the rows."""
    size: int = 500
    """Rows in all."""
    seed: int = 0
    split: Split = "train"
    """train and eval share no question, whatever their seeds; `all` is both."""
    level: int | None = None
    """Difficulty by the datasets' own curricula, from 0; the highest of those that have no more; None for
    their defaults."""
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings of a dataset, by its name; they go before what the level says."""
    instruction: str = INSTRUCTIONS["auto"]
    """Said under every question; empty for the question alone."""
    max_chance: float = 0.66
    """Datasets of which one constant answer solves a larger share are refused."""

    def __post_init__(self) -> None:
        """Refuse what no rows can be made of.

        Raises:
            ConfigError: naming the field.
        """
        checks = (
            ("weights", self.weights, bool(self.weights) and all(w > 0 for w in self.weights.values()), "weights > 0"),
            ("size", self.size, self.size >= len(self.weights), f"at least {len(self.weights)}, one for each dataset"),
            ("split", self.split, self.split in SPLITS, f"one of {', '.join(SPLITS)}"),
            ("level", self.level, self.level is None or self.level >= 0, "None or an integer >= 0"),
            ("config", dict(self.configs), set(self.configs) <= set(self.weights), f"among {', '.join(self.weights)}"),
        )
        for name, value, holds, expected in checks:
            if not holds:
                raise ConfigError(f"reasoning_gym.{name}: expected {expected}, got {value!r:.200}. Change it.")
        _refuse_chance(self.weights, self.max_chance)


def dataset_names() -> dict[str, list[str]]:
    """The names of all datasets by category, `composite` aside.

    Raises:
        MissingDependency: reasoning-gym is not installed.
    """
    require_reasoning_gym()
    from reasoning_gym.factory import DATASETS

    found: dict[str, list[str]] = {}
    for name, (cls, _) in sorted(DATASETS.items()):
        if name != "composite":
            found.setdefault(cls.__module__.split(".")[1], []).append(name)
    return found


def num_levels(name: str) -> int:
    """How many levels the dataset's curriculum has; 0 where it has none."""
    from reasoning_gym.factory import CURRICULA

    made: Any = CURRICULA.get(name)
    return max((len(attribute.levels) for attribute in made().attributes.values()), default=0) if made else 0


def make_rows(mixture: Mixture) -> Iterator[dict[str, Any]]:
    """The rows, in an order by the seed; no question comes twice.

    Raises:
        ConfigError: a dataset is unknown, or refuses its settings or the level.
        DataError: a dataset has not so many different questions.
        MissingDependency: reasoning-gym is not installed.
    """
    source = f"reasoning-gym {require_reasoning_gym()} ({_LICENCE})"
    rows: list[dict[str, Any]] = []
    for name, count in _shares(mixture).items():
        for number, item in enumerate(_items(name, count, mixture)):
            identity = f"{name}-{mixture.split}-{mixture.seed}-{number}"
            told = f"{item['question']}\n\n{mixture.instruction}" if mixture.instruction else item["question"]
            rows.append({
                "id": identity if mixture.level is None else f"{identity}-level{mixture.level}",
                "prompt": [{"role": "user", "content": told}],
                "label": json.dumps(item, default=str, ensure_ascii=False),
                "dataset": str(item["metadata"]["source_dataset"]),
                "level": mixture.level,
                "source": source,
            })  # fmt: skip
    random.Random(hash64(mixture.seed, mixture.split, "order")).shuffle(rows)
    yield from rows


def hash64(*parts: object) -> int:
    """Sixty-four bits that are the same in every process; neighbours have nothing in common."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


def split_of(item: Mapping[str, Any]) -> Split:
    """The split that an item belongs to, by its question alone: neither seed nor size nor order changes it.

    Variations of one ARC puzzle belong together.
    """
    metadata = item["metadata"]
    name = metadata["source_dataset"]
    key = metadata["task_id"] if name in BY_TASK_ID else item["question"]
    return "eval" if hash64("split", name, key) < EVAL_SHARE * 2**64 else "train"


def _refuse_chance(weights: Mapping[str, float], most: float) -> None:
    for name in weights:
        if CHANCE.get(name, 0.0) > most:
            raise ConfigError(
                f"reasoning_gym.datasets: expected datasets of which no constant answer solves more than {most:.0%}, "
                f"got {name} ({CHANCE[name]:.0%}). Leave it out, or raise --max_chance."
            )


def _shares(mixture: Mixture) -> dict[str, int]:
    """Rows for each dataset: one at least, and what is left by weight, the largest remainders first."""
    total, left = sum(mixture.weights.values()), mixture.size - len(mixture.weights)
    exact = {name: left * weight / total for name, weight in mixture.weights.items()}
    counts = {name: 1 + int(share) for name, share in exact.items()}
    behind = sorted(exact, key=lambda name: int(exact[name]) - exact[name])
    for name in behind[: mixture.size - sum(counts.values())]:
        counts[name] += 1
    return counts


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
    """Without what datasets print, and the files that one leaves open."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _num_tries(count: int) -> int:
    """How many items are made for so many rows, at most: of the split eval nine in ten are of the other."""
    return _TRIES_PER_ROW * (count + 10)


def _dataset(name: str, count: int, mixture: Mixture) -> tuple[Any, dict[str, Any]]:
    """The dataset, and those of its settings that its scorer needs, where they are not the default."""
    from reasoning_gym.factory import DATASETS, create_dataset

    given = dict(mixture.configs.get(name, {}))
    if name not in DATASETS:
        groups = dataset_names()
        known = [*groups, "all", "composite", *(other for names in groups.values() for other in names)]
        raise ConfigError(
            f"reasoning_gym.datasets: expected a dataset, a category, all or composite, got {name!r}."
            f"{nearest(name, known)} --list shows all."
        )
    # Not more than 31 bits: one dataset refuses larger seeds.
    settings = {**_of_level(name, mixture.level), **given, "seed": hash64(mixture.seed, mixture.split, name) >> 33}
    try:
        with _quietly():
            dataset = create_dataset(name, **{"size": _num_tries(count), **_specs(name, settings)})
    except (AssertionError, TypeError, ValueError, KeyError) as error:
        fields = [field for field in DATASETS[name][1].__dataclass_fields__ if field not in ("seed", "size")]
        # pytest adds lines to the failed asserts of modules that it rewrites.
        why = str(error).partition("\n")[0]
        raise ConfigError(
            f"reasoning_gym.config: expected settings of {name} ({', '.join(fields)}) that go together, got {given!r}"
            f"{'' if mixture.level is None else f' at level {mixture.level}'}: {why}. Change them, or leave it out "
            f"(all,-{name})."
        ) from error
    kept = {key: value for key, value in settings.items() if key != "seed"} if name in SCORED_BY_CONFIG else {}
    return dataset, kept


def _specs(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """For `composite`: its parts as it wants them."""
    if name != "composite":
        return settings
    from reasoning_gym.composite import DatasetSpec

    parts = [DatasetSpec(**{"weight": 1.0, "config": {}, **part}) for part in settings.get("datasets") or ()]
    return {**settings, "datasets": parts}


def _of_level(name: str, level: int | None) -> dict[str, Any]:
    """The settings of a level, or of the highest there is; of datasets without a curriculum, none."""
    if level is None or not (most := num_levels(name)):
        return {}
    from reasoning_gym.factory import create_curriculum

    curriculum: Any = create_curriculum(name)
    curriculum.set_global_level(min(level, most - 1))
    made = curriculum.generate_configuration({})
    default = type(made)()
    changed = {key: getattr(made, key) for key in type(made).__dataclass_fields__}
    return {key: value for key, value in changed.items() if value != getattr(default, key) and key != "seed"}
