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
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, get_args

from agentenv._util.suggest import did_you_mean
from agentenv.core.arguments import one_of, parse_json_object
from agentenv.errors import ConfigError, DataError
from agentenv_envs.common import check
from agentenv_envs.reasoning_gym.data_only import BY_TASK_ID, CHANCE, SCORED_BY_CONFIG
from agentenv_envs.reasoning_gym.reward import INSTRUCTIONS, AnswerForm, require_reasoning_gym

Split = Literal["train", "eval", "all"]
EVAL_SHARE = 0.1
"""Share of all possible questions. It is fixed: with two values, files of different splits could share a question."""
_TRIES_PER_ROW = 60
_LICENSE = "Apache-2.0"


@dataclass(frozen=True)
class RowsConfig:
    """Write rows of reasoning-gym's datasets for `agentenv run --env reasoning_gym --data FILE`."""

    datasets: str = "all"
    """Names, categories (see --list) or `all`, separated by commas; NAME=WEIGHT for another share than 1; then -NAME to
    exclude one."""
    size: int = 500
    """Total number of rows, divided by the weights."""
    seed: int = 0
    split: Split = "train"
    """train and eval never share a question, with any seeds; all is both."""
    out: str = "reasoning_gym.jsonl"
    """The file to write."""
    level: int | None = None
    """Difficulty in the datasets' own curricula, from 0. Datasets with fewer levels use their highest, those without
    any their defaults."""
    config: str = "{}"
    """JSON object with settings of a dataset by its name, such as {"chain_sum": {"min_terms": 3}}."""
    answer: AnswerForm = "auto"
    """The form in which the policy is told to answer: tag (also auto) or boxed. Use the same in --env_kwargs."""
    instruction: str | None = None
    """Text below every question instead of the default; empty for none."""
    max_chance: float = 0.66
    """Refuse a dataset of which one constant answer solves a larger share; exclude it from a category or `all`."""
    list: bool = False
    """Show the datasets by category, with known problems of each, and write nothing."""


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


def make_rows(weights: Mapping[str, float], config: RowsConfig) -> list[dict[str, Any]]:
    """Return rows of datasets by their weights, in an order by the seed; no question occurs twice.

    Raises:
        ConfigError: a dataset is unknown, a value is invalid, or a dataset refuses its settings or the level.
        DataError: a dataset does not have that many different questions.
        MissingDependency: reasoning-gym is not installed.
    """
    one_of("reasoning_gym.split", config.split, get_args(Split))
    one_of("reasoning_gym.answer", config.answer, get_args(AnswerForm))
    configs = parse_json_object("--config", config.config)
    for name, value, holds, expected in (
        ("weights", weights, bool(weights) and all(weight > 0 for weight in weights.values()), "weights > 0"),
        ("size", config.size, config.size >= len(weights), f"at least {len(weights)}, one for each dataset"),
        ("level", config.level, config.level is None or config.level >= 0, "None or an integer >= 0"),
        ("config", configs, set(configs) <= set(weights), f"among {', '.join(weights)}"),
    ):
        check(f"reasoning_gym.{name}", value, holds, expected)
    for name in weights:
        if CHANCE.get(name, 0.0) > config.max_chance:
            raise ConfigError(
                "reasoning_gym.datasets: expected datasets of which no constant answer solves more than "
                f"{config.max_chance:.0%}, got {name} ({CHANCE[name]:.0%}). Exclude it, or raise --max_chance."
            )
    source = f"reasoning-gym {require_reasoning_gym()} ({_LICENSE})"
    instruction = INSTRUCTIONS[config.answer] if config.instruction is None else config.instruction
    below = f"\n\n{instruction}" if instruction else ""
    rows: list[dict[str, Any]] = []
    # At least one row of each dataset, the rest by weight, largest remainders first.
    total, left = sum(weights.values()), config.size - len(weights)
    exact = {name: left * weight / total for name, weight in weights.items()}
    counts = {name: 1 + int(share) for name, share in exact.items()}
    behind = sorted(exact, key=lambda name: int(exact[name]) - exact[name])
    for name in behind[: config.size - sum(counts.values())]:
        counts[name] += 1
    for name, count in counts.items():
        for number, item in enumerate(_items(name, count, config, dict(configs.get(name, {})))):
            identity = f"{name}-{config.split}-{config.seed}-{number}"
            rows.append(
                {
                    "id": identity if config.level is None else f"{identity}-level{config.level}",
                    "prompt": [{"role": "user", "content": item["question"] + below}],
                    "label": json.dumps(item, default=str, ensure_ascii=False),
                    "dataset": str(item["metadata"]["source_dataset"]),
                    "level": config.level,
                    "source": source,
                }
            )
    random.Random(hash64(config.seed, config.split, "order")).shuffle(rows)
    return rows


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


def _items(name: str, count: int, config: RowsConfig, custom: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    dataset, stored = _dataset(name, count, config, custom)
    seen: set[str] = set()
    for index in range(_num_tries(count)):
        with _quietly():
            item = dataset[index]
        if item["question"] in seen or config.split not in ("all", split_of(item)):
            continue
        seen.add(item["question"])
        yield {**item, "config": stored} if stored else item
        if len(seen) == count:
            return
    raise DataError(
        f"reasoning_gym.{name}: expected {count} different questions of the split {config.split}, got {len(seen)} in "
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


def _dataset(name: str, count: int, config: RowsConfig, custom: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the dataset, and the non-default settings that its scorer needs."""
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS, create_curriculum, create_dataset

    if name not in DATASETS:
        groups = dataset_names()
        known = [*groups, "all", "composite", *(other for names in groups.values() for other in names)]
        raise ConfigError(
            f"reasoning_gym.datasets: expected a dataset, a category, all or composite, got {name!r}."
            f"{did_you_mean(name, known)} --list shows all."
        )
    settings: dict[str, Any] = {}
    if config.level is not None and (most := num_levels(name)):  # of the level, or of the highest one
        curriculum: Any = create_curriculum(name)
        curriculum.set_global_level(min(config.level, most - 1))
        harder = curriculum.generate_configuration({})
        default = type(harder)()
        changed = {key: getattr(harder, key) for key in type(harder).__dataclass_fields__}
        settings = {key: value for key, value in changed.items() if value != getattr(default, key)}
    # At most 31 bits: one dataset refuses larger seeds.
    settings |= {**custom, "seed": hash64(config.seed, config.split, name) >> 33}
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
            f"{'' if config.level is None else f' at level {config.level}'}: {why}. Change them, or exclude it "
            f"(all,-{name})."
        ) from error
    stored = {key: value for key, value in settings.items() if key != "seed"} if name in SCORED_BY_CONFIG else {}
    return dataset, stored
