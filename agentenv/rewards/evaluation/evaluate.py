"""The evaluation of a reward model on preference data, many items concurrently.

Each answer goes through `ModelReward` and `graded`, as in a rollout: the same messages, template, length policy and
errors. An item that could not be scored has an error and no score; it never counts as wrong. `EvaluationLog` stores
each outcome as a line of JSON, so that an interrupted evaluation can be resumed.

What is evaluated is a reward model, wherever it runs, a judge, or any reward of text; opening it imports what it needs:

    hf:PATH, ray:PATH, http://…, classify:http://…, FILE.py
                            a reward model; see `agentenv.rewards.models.factory`
    judge:MODEL@http://…    a language model that compares two answers; judge-score:… scores each answer
    reward:NAME             a reward of text; see `agentenv.rewards.registry`
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from agentenv.core.arguments import construct, is_finite, whole_number
from agentenv.errors import AgentEnvError, ConfigError, DataError, RunStopped
from agentenv.rewards.evaluation.rewardbench import is_tie
from agentenv.rewards.evaluation.rows import Candidate, Item
from agentenv.rewards.grading import grade
from agentenv.rewards.groups.tournament import Comparer
from agentenv.rewards.models.factory import SCORERS, open_scorer, parsed, unknown
from agentenv.rewards.models.reward import ModelReward
from agentenv.rewards.models.types import RewardScorer, ready
from agentenv.rewards.types import Response, Reward, Status

_OTHERS = ("judge", "judge-score", "reward")
_FLAGS = ("max_length", "overflow", "device", "dtype", "max_batch")
"""Arguments of scorers with their own flag; others go into --rm_args."""


@dataclass(frozen=True, slots=True)
class RewardModel:
    """The object to evaluate: a scorer, a reward or a comparer."""

    spec: str
    scorer: RewardScorer | None = None
    reward: Reward | None = None
    comparer: Comparer | None = None
    judge: Any = None
    """The client behind `reward` or `comparer`, if any."""

    async def close(self) -> None:
        """Close the model and the client."""
        for part in (self.scorer, self.judge):
            if part is not None:
                await part.close()

    def metrics(self) -> dict[str, float]:
        """Return a judge's usage, and the number of comparisons decided by position; {} for other models."""
        figures: dict[str, float] = {} if self.judge is None else self.judge.usage.metrics()
        both = getattr(self.comparer, "order", "both") == "both"  # a single order cannot flip a verdict
        for name in ("num_compared", "num_flipped") if both else ("num_compared",):
            if hasattr(self.comparer, name):
                figures[f"judge/{name}"] = float(getattr(self.comparer, name))
        return figures


def parse_rm_spec(spec: str) -> tuple[str, str]:
    """Return a spec's kind and target; nothing is opened.

    Raises:
        ConfigError: the kind is unknown, or the folder is missing.
    """
    kind, target = parsed(spec)
    if kind not in (*SCORERS, *_OTHERS):
        raise unknown(spec, [*SCORERS, *_OTHERS])
    return kind, target


@contextmanager
def flags_in_errors() -> Iterator[None]:
    """Add the name of the flag to errors about a constructor's argument.

    Raises:
        ConfigError: the error with the flag.
    """
    try:
        yield
    except ConfigError as error:
        match = re.match(r"(?:HF|Ray|GetReward|VLLMHTTP|Function)Scorer\.(\w+): ", str(error))
        if match is None or match[1] in ("url", "model"):
            raise
        value = '"PATH"' if match[1] == "tokenizer" else "…"
        flag = f"--{match[1]}" if match[1] in _FLAGS else f"--rm_args '{{\"{match[1]}\": {value}}}'"
        raise ConfigError(f"{error} The flag is {flag}.") from error


def open_rm(spec: str, /, **options: Any) -> RewardModel:
    """Return the reward model, judge or reward of a spec; a model is loaded later.

    Args:
        spec: see the module.
        options: arguments of its constructor.

    Raises:
        ConfigError: the spec or an option is unknown.
        MissingDependency: a package that it needs is not installed.
    """
    kind, target = parse_rm_spec(spec)
    if kind == "reward":
        from agentenv.rewards.registry import make_reward

        return RewardModel(spec, reward=make_reward(target, **options))
    if kind in ("judge", "judge-score"):
        model, at, url = target.rpartition("@")
        if not at or not model:
            raise ConfigError(
                f"--rm: expected {kind}:MODEL@http://HOST/v1, got {spec!r}. Pass the model and its server."
            )
        from agentenv.rewards.judges.asking import client_options, judge_from
        from agentenv.rewards.judges.comparisons import PairwiseJudge
        from agentenv.rewards.judges.pointwise import PointwiseReward

        of_client = {name: value for name, value in options.items() if name in client_options()}
        client = judge_from(of_client | {"base_url": url, "model": model})
        rest = {name: value for name, value in options.items() if name not in of_client}
        if kind == "judge":
            return RewardModel(spec, comparer=construct(f"rm {spec}", PairwiseJudge, rest, client), judge=client)
        return RewardModel(spec, reward=construct(f"rm {spec}", PointwiseReward, rest, client), judge=client)
    return RewardModel(spec, scorer=open_scorer(spec, **options))


# --- the evaluation ---------------------------------------------------------------------------------------------------

LIMIT_S = 3600.0
"""Default time limit per answer, without the time to load the model."""
_MAX_ERROR_CHARS = 500


@dataclass(frozen=True, slots=True)
class ItemOutcome:
    """The scores of one item."""

    index: int
    item_id: str
    subset: str
    scores: tuple[float | None, ...]
    """Raw score of each answer, the chosen ones first. A comparison has the answers' points, which sum to 1."""
    num_chosen: int
    truncated: tuple[bool, ...] = ()
    error: str = ""
    """The reason why a score is missing; empty if none is."""

    @property
    def known(self) -> tuple[float, ...] | None:
        """All scores; None if one is missing."""
        scores = tuple(score for score in self.scores if score is not None)
        return scores if len(scores) == len(self.scores) and scores else None

    @property
    def tie(self) -> bool:
        """Whether neither side was preferred."""
        return self.known is not None and is_tie(self.known, self.num_chosen)

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome's line in the log."""
        return {**asdict(self), "tie": self.tie}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Return the outcome of a log line.

        Raises:
            DataError: another version wrote the line.
        """
        try:
            fields = {name: row[name] for name in cls.__dataclass_fields__}
            lists = {name: tuple(fields[name]) for name in ("scores", "truncated")}
        except (KeyError, TypeError) as error:
            raise DataError(f"items.jsonl: expected an item of this version, got {row!r:.100}: {error}.") from error
        return cls(**{**fields, **lists})


@dataclass(frozen=True, slots=True)
class _AnswerScore:
    value: float | None
    truncated: bool = False
    error: str = ""


async def evaluate(
    rm: RewardModel,
    items: Sequence[Item],
    *,
    max_concurrent: int = 64,
    limit_s: float = LIMIT_S,
    on_outcome: Callable[[ItemOutcome], None] = lambda _: None,
) -> list[ItemOutcome]:
    """Return the outcomes of all items, in order.

    Args:
        rm: the reward model, reward or judge.
        items: the comparisons.
        max_concurrent: items evaluated concurrently.
        limit_s: time limit per answer or comparison.
        on_outcome: called with each outcome as soon as it is known.

    Raises:
        ConfigError: the reward model cannot be loaded or has wrong settings, or it compares pairs and an item is not a
            pair.
        Exception: raised by `on_outcome`.
    """
    free = asyncio.Semaphore(whole_number("--max_concurrent", max_concurrent, low=1))
    if rm.comparer is not None and (several := [item.item_id for item in items if not item.is_pair]):
        raise ConfigError(
            f"--rm {rm.spec}: expected pairs for a judge that compares two answers, got item {several[0]!r} with more. "
            "Use judge-score:…, which scores each answer."
        )
    await ready(rm.scorer)  # first, so that a wrong setting is raised once instead of failing every item

    async def one(item: Item) -> ItemOutcome:
        async with free:
            if rm.comparer is not None:
                rated = await _compare(rm.comparer, item, limit_s)
            else:
                rated = await asyncio.gather(*(_score_answer(rm, each, limit_s) for each in item.candidates))
        outcome = ItemOutcome(
            index=item.index,
            item_id=item.item_id,
            subset=item.subset,
            scores=tuple(each.value for each in rated),
            num_chosen=item.num_chosen,
            truncated=tuple(each.truncated for each in rated),
            error=next((each.error for each in rated if each.error), "")[:_MAX_ERROR_CHARS],
        )
        on_outcome(outcome)
        return outcome

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one(item)) for item in items]
    except ExceptionGroup as group:  # raised by `on_outcome`
        raise group.exceptions[0] from group
    return [task.result() for task in running]


async def _score_answer(rm: RewardModel, candidate: Candidate, limit_s: float) -> _AnswerScore:
    """Return the raw score of one answer, or why it has none.

    An error `data` is one of the item, `contract` one of the reward's code, and `infra` one of the model.

    Raises:
        ConfigError: the settings are wrong, so that no item can have a score.
    """
    reward = rm.reward if rm.scorer is None else ModelReward(rm.scorer)
    assert reward is not None
    result = await grade(reward, Response(candidate.text, prompt=candidate.prompt), limit_s=limit_s)
    if not result.status.valid:
        if result.is_misconfigured:
            raise ConfigError(str(result.cause)) from result.cause
        kind = {Status.LABEL: "data", Status.ERROR: "contract"}.get(result.status, "infra")
        return _AnswerScore(None, error=f"{kind}: {result.detail}")
    return _AnswerScore(result.reward, bool(result.components.get("truncated")))


async def _compare(comparer: Comparer, item: Item, limit_s: float) -> list[_AnswerScore]:
    """Return the points of the two answers."""
    chosen, rejected = item.candidates
    try:
        async with asyncio.timeout(limit_s):
            points = await comparer.compare(chosen.prompt, chosen.text, rejected.text)
    except ConfigError as error:
        raise ConfigError(str(error)) from error
    except (AgentEnvError, TimeoutError) as error:
        return [_AnswerScore(None, error=f"infra: {error or f'no verdict within {limit_s:g} s'}")] * 2
    if points is None or not is_finite(points):
        return [_AnswerScore(None, error=f"infra: expected a verdict, got {points!r}")] * 2
    return [_AnswerScore(points), _AnswerScore(1.0 - points)]


# --- the log of an evaluation ----------------------------------------------------------------------------------------


def fingerprint(items: Sequence[Item]) -> str:
    """Return a hash of the items and their order."""
    content = hashlib.sha256()
    for item in items:
        content.update(json.dumps(asdict(item), sort_keys=True, default=str).encode())
    return content.hexdigest()


class EvaluationLog:
    """The outcomes of an evaluation in `items.jsonl`, and its settings in `config.json`.

    Args:
        folder: created if it is missing.
        config: settings that a resumed evaluation must have too.
        resume: continue the evaluation in the folder.
        flags: all flags of the command, for `stored_flags`.

    `config.json` is written by `start`, or with the first outcome, so that a model that fails to load leaves no files.

    Raises:
        ConfigError: the folder has an evaluation and `resume` is False, or its settings differ.
    """

    def __init__(
        self,
        folder: str | Path,
        config: Mapping[str, Any],
        *,
        resume: bool = False,
        flags: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = Path(folder).expanduser()
        self._path = self.folder / "items.jsonl"
        self._config = {**config, "flags": dict(flags or {})}
        self.started = False
        self.num_stored = 0
        """Items with scores, including those of earlier runs."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Another evaluation in the folder is an error, even one without outcomes.
            path = self.folder / "config.json"
            if self._path.exists() and self._path.stat().st_size > 0 and not resume:
                raise ConfigError(
                    f"--out: expected a new folder, got {self.folder}. Pass --resume to continue, or use another."
                )
            stored = _parse_object(path.read_bytes(), str(path)) if path.exists() else dict(config)
            for name in {**stored, **config}:
                if name != "flags" and stored.get(name) != config.get(name):
                    advice = "Evaluate the same data" if name == "data_sha256" else f"Omit --{name}"
                    raise ConfigError(
                        f"--out: {self.folder} has an evaluation: expected its {name}, which is "
                        f"{stored.get(name)!r:.200}, got {config.get(name)!r:.200}. {advice}, or use another --out."
                    )
            complete, _, torn = (self._path.read_bytes() if self._path.exists() else b"").rpartition(b"\n")
            if torn:
                self._path.write_bytes(complete + b"\n" if complete else b"")
            outcomes = [ItemOutcome.from_dict(_parse_object(line, str(self._path))) for line in complete.splitlines()]
            self.done = {outcome.index: outcome for outcome in outcomes if not outcome.error}
            """Items with scores by index. Incomplete lines and failed items are evaluated again."""
            self.num_stored = len(self.done)
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--out: expected a writable folder, got {error}. Use another.") from error

    def start(self) -> None:
        """Write the settings.

        Raises:
            RunStopped: the disk is full, or the file cannot be written.
        """
        text = json.dumps(self._config, indent=2) + "\n"
        with self._stop_on_error():
            (self.folder / "config.json").write_text(text, "utf-8")
        self.started = True

    def write(self, outcome: ItemOutcome) -> None:
        """Append an outcome.

        Raises:
            RunStopped: the disk is full, or the file cannot be written.
        """
        if not self.started:
            self.start()
        with self._stop_on_error():
            self._file.write(json.dumps(outcome.to_dict()) + "\n")
            self._file.flush()
        self.num_stored += not outcome.error

    @contextmanager
    def _stop_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunStopped(
                f"{self._path}: expected to write an item, got {error}. Free disk space, then --resume."
            ) from error

    def close(self) -> None:
        """Close the file; calling it again is harmless."""
        with suppress(OSError):  # a failed write was already reported
            self._file.close()


def stored_flags(folder: str | Path) -> dict[str, Any] | None:
    """Return the flags of the evaluation in a folder, None if there is none.

    Raises:
        DataError: its settings cannot be read.
    """
    path = Path(folder).expanduser() / "config.json"
    if not path.is_file():
        return None
    flags = _parse_object(path.read_bytes(), str(path)).get("flags")
    if not isinstance(flags, dict):
        raise DataError(f"{path}: expected the flags of `rm eval`, got {flags!r:.60}. Use another --out.")
    return flags


def _parse_object(text: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise DataError(f"{where}: expected JSON, got {text[:60]!r} ({error}). Use another --out.") from error
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected a JSON object, got {value!r:.60}. Use another --out.")
    return value
