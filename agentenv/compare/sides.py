"""One side of a comparison: the outcomes of a run's episodes by task, and the flags that they came from."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from agentenv._util.estimates import Passes
from agentenv._util.jsonable import jsonable
from agentenv.core.trajectory import Trajectory
from agentenv.core.types import StopReason, Task
from agentenv.errors import ConfigError
from agentenv.runs.metrics import GROUP_REWARD, Summary, summarize
from agentenv.runs.mixture import mixture_of
from agentenv.runs.prepare import changed_files
from agentenv.runs.records.directory import CONFIG, RecordedEpisodes, check_run, read_config, read_trajectories
from agentenv.runs.records.filters import EpisodeFilter
from agentenv.runs.records.scan import ReadReport
from agentenv.runs.records.selection import Selection, rewards_of_groups, select
from agentenv.runs.records.steps import STEPS, read_steps
from agentenv.runs.records.tokenizer import training_of

if TYPE_CHECKING:
    from agentenv.runs.rollout import Run

By = Literal["reward", "score", "passed"]
DRAWS = ("seed", "model")
"""Flags on which the draws of a run depend."""
Source: TypeAlias = "str | Path | Run | Iterable[Trajectory]"
"""A run directory, of `run` or `train`; RUN@STEP for the evaluation of a training at a train step; a `.jsonl` file; a
Run; or trajectories."""


@dataclass(frozen=True, slots=True)
class EpisodeOutcome:
    """What a comparison needs of an episode."""

    reward: float | None
    score: float | None
    passed: bool | None
    """None if unknown."""
    stop_reason: str
    num_action_tokens: int | None
    failure: str
    """Why it has no reward: the kind of the error, or else the stop reason; empty if it has one."""
    info: Mapping[str, float] = field(default_factory=dict)
    """As `Summary.info_last`."""
    cost_usd: float | None = None
    """As `Summary.cost_usd`; None also if it failed, since that is only a part."""
    episode_id: str = ""

    def value(self, by: By) -> float | None:
        """Return the number to compare; None if unknown, as of an episode without a reward."""
        if by == "passed":
            return None if self.passed is None else float(self.passed)
        return self.reward if by == "reward" else self.score


@dataclass(slots=True)
class Side:
    """The episodes of one run, and what identifies it."""

    name: str
    step: int | None = None
    """The train step of an evaluation."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """`config` of config.json; empty if there is none."""
    mixed_files: Collection[str] = ()
    """Files of code that changed before a resume, so that the episodes are of more than one version."""
    kept: bool = False
    """True if the episodes are those that a training kept of its train steps."""
    outcomes: dict[str, list[EpisodeOutcome]] = field(default_factory=lambda: defaultdict(list))
    """By task."""
    contents: dict[str, str] = field(default_factory=dict)
    """Prompt and label of each task, as JSON."""
    metadata: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """`Task.metadata` of each task; with the key `env`, the environment's name in a mixture."""
    environments: dict[str, str] = field(default_factory=dict)
    """Of each task of a mixture, the name; empty if unknown."""
    trained: Mapping[str, Any] = field(default_factory=dict)
    """`env` of a training's flags with the environments that `keep_entries` left out, since they changed the model."""
    models: Counter[str] = field(default_factory=Counter)
    """Number of actions by the model that a server of chat completions named."""
    damage: str = ""
    """Lines that could not be read, in words."""

    @property
    def flags(self) -> Mapping[str, Any]:
        """The flags of the run; empty if unknown."""
        return self.config.get("flags") or {}

    @property
    def has_trained(self) -> bool:
        """True if the episodes are of a training that has changed its model."""
        return "rollout_batch_size" in self.flags and self.step != 0

    @property
    def training(self) -> Path | None:
        """The folder of the training that made the model; None if that is unknown, or it has not changed its model."""
        if "rollout_batch_size" in self.flags:
            return Path(self.name).resolve() if self.has_trained else None
        folder = Path(str(self.flags.get("model"))).resolve().parent
        return folder if (folder / STEPS).is_file() else None

    @property
    def eval_sets(self) -> Sequence[str]:
        """The values of --eval_dataset, of which config.json has a single one as text."""
        found = self.flags.get("eval_dataset") or ()
        return (found,) if isinstance(found, str) else found

    def describe(self, task_id: str, task: Task) -> None:
        """Store content and metadata of a task that is new."""
        if task_id not in self.contents:
            self.contents[task_id] = json.dumps(jsonable([task.prompt, task.label]), sort_keys=True)
            self.metadata[task_id] = {"env": task.env, **task.metadata} if task.env else task.metadata
            self.environments.update({task_id: task.env} if task.env else {})

    @property
    def set_names(self) -> Mapping[str, str]:
        """The names of the sets of an evaluation by their values, as `load_held_out` of a training gives them."""
        short = {spec: Path(spec.rpartition("=")[2]).name.partition(".")[0] for spec in self.eval_sets}
        counts = Counter(short.values())
        return {spec: spec.replace("/", "-") if counts[name] > 1 else name for spec, name in short.items()}

    def keep_entries(self, names: Collection[str]) -> None:
        """Leave out of the flags of a mixture the entries and the evaluation sets of other environments."""
        entries = mixture_of(self.flags)
        if kept := [entry for entry in entries if entry["name"] in names]:
            others = {entry["name"] for entry in entries}.difference(names)
            sets = [spec for spec in self.eval_sets if spec.partition("=")[0] not in others]
            flags = {**self.flags, "env": kept, "eval_dataset": sets[0] if len(sets) == 1 else sets or None}
            self.trained = {"env": self.flags["env"]} if "rollout_batch_size" in flags else {}
            self.config = {**self.config, "flags": flags}

    def name_sets(self, other: Side) -> None:
        """Begin the ids of an evaluation with the names that another one, with several sets, has of the same sets."""
        if self.step is None or other.step is None or len(other.eval_sets) < 2:
            return
        is_single, theirs = len(self.eval_sets) == 1, other.set_names
        names = {}  # the beginning of an id here and there
        for spec, own in self.set_names.items():
            name = theirs.get(spec, own if is_single and own in theirs.values() else None)
            if name is not None:
                names["" if is_single else f"{own}/"] = f"{name}/"
        outcomes = {}
        for task_id, row in self.outcomes.items():
            start = next((each for each in names if task_id.startswith(each)), "")
            outcomes[names.get(start, "") + task_id.removeprefix(start)] = row
        self.outcomes = outcomes


def read_side(source: Source, where: EpisodeFilter | None = None) -> Side:
    """Return the episodes of a run that a filter keeps: of a training those of its last evaluation, or of that at STEP.

    A training without evaluations has the episodes that it kept of its train steps.

    Raises:
        ConfigError: the path is not a run, STEP has no evaluation, or the filter keeps no episode.
        DataError: the record has another schema.
    """
    report = ReadReport()
    folder: Path | None
    trajectories: Iterable[Trajectory]
    recorded: Iterable[Trajectory]
    indexed: Iterable[tuple[Task, Summary]] = ()
    if isinstance(source, str | Path):
        path, step = split_step(str(source))
        check_run(path)
        folder = Path(path)
        if training := training_of(folder):
            raise ConfigError(
                f"{path}: expected a run, got the episodes that a training keeps of all its evaluations. Compare an "
                f"evaluation as a whole: {training}@STEP."
            )
        if evaluation := evaluation_at(folder, step):
            return _evaluated_side(folder, evaluation, where)
        trajectories, recorded = (), read_trajectories(path, report=ReadReport())
        if where is None and folder.is_dir():
            indexed = _indexed(RecordedEpisodes(folder, report=report))
        else:
            trajectories = select(path, Selection(where=where), report=report)
    else:
        folder, trajectories = getattr(source, "out", None), list(source)
        recorded = trajectories
        if where is not None:
            rewards = rewards_of_groups(trajectories)
            trajectories = [each for each in trajectories if where.matches(each, rewards[each.group_id])]
    has_config = folder is not None and (folder / CONFIG).is_file()
    document = read_config(folder) if folder and has_config else {}
    side = Side(str(folder or "trajectories"), config=document.get("config", {}))
    side.kept = "rollout_batch_size" in side.flags
    if not side.kept:
        changes = document.get("changed", [])
        side.mixed_files = list(dict.fromkeys(name for change in changes for name in changed_files(*change)))
    judge = PassRule(side.config)
    for task, summary in chain(indexed, ((each.task, summarize(each)) for each in trajectories)):
        task_id = task.task_id or summary.group_id
        if side.kept:  # a training adds the number of the pass over the data: 000443@2
            task_id = re.sub(r"(?<=.)@\d+$", "", task_id)
        side.describe(task_id, task)
        side.outcomes[task_id].append(judge.outcome(summary))
        side.models.update(summary.models)
    _check_kept(where, side, side.name, ((each.task.task_id or each.group_id, each.task.env) for each in recorded))
    side.damage = report.damage
    judge.settle(side)
    return side


def _evaluated_side(folder: Path, evaluation: Mapping[str, Any], where: EpisodeFilter | None) -> Side:
    name, episodes = f"{folder}@{evaluation['step']}", list(evaluated(evaluation))
    side = Side(str(folder), step=evaluation["step"], config=_config_at(folder, evaluation["step"]))
    judge = PassRule(side.config)
    for episode in episodes:
        if where is None or where.keeps_task(episode.group_id, episode.env, name):
            side.outcomes[episode.group_id].append(judge.outcome(episode))
            side.environments.update({episode.group_id: episode.env} if episode.env else {})
    _check_kept(where, side, name, ((episode.group_id, episode.env) for episode in episodes))
    judge.settle(side)
    return side


def _config_at(folder: Path, step: int) -> Mapping[str, Any]:
    """Return the `config` of a training with which it evaluated a step, before what later resumes changed."""
    document = read_config(folder)
    config = document["config"]
    for change in reversed(document.get("changed", [])):
        was = {name: old for name, (old, _) in change["was_and_is"].items()}
        if change["from_step"] <= step or not was.get("eval_dataset", True):  # without a set, nothing was evaluated
            break
        files = was.pop("agent_file", config.get("agent_file"))
        config = {**config, "flags": {**config["flags"], **was}, "agent_file": files}
    return dict(config)


def _check_kept(where: EpisodeFilter | None, side: Side, name: str, episodes: Iterable[tuple[str, str]]) -> None:
    """Raise ConfigError if a filter kept no episode; `episodes` has the task and the environment of each."""
    if where is None or side.outcomes or not (known := list(episodes)):
        return
    where.check_environments(name, (env for _, env in known))
    raise ConfigError(
        f"--where: expected a filter that keeps episodes of {name}, got none of {len(known)}, such as one of "
        f"task {known[0][0]!r}. Correct the filter."
    )


def _indexed(episodes: RecordedEpisodes) -> Iterator[tuple[Task, Summary]]:
    """Yield the task and the summary of each episode. Of a group one episode is read, since its task is that of all."""
    tasks: dict[str, Task] = {}
    for place, summary in enumerate(episodes.summaries):
        if summary.group_id not in tasks:
            tasks[summary.group_id] = episodes.read(place).task
        yield tasks[summary.group_id], summary


class PassRule:
    """Decides which episodes of a side passed, as metrics.json does."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.pass_scores: Mapping[str, float | None] = config.get("pass_scores") or {}
        self._passes = Passes((config.get("flags") or {}).get("pass_score"))

    def outcome(self, episode: Summary) -> EpisodeOutcome:
        """Return the outcome of an episode."""
        passed = None
        if episode.reward is not None:
            own_reward = episode.reward - episode.info_last.get(GROUP_REWARD, 0.0)
            passed = self._passes.passed(own_reward, episode.score, self.pass_scores.get(episode.env))
        stop = str(episode.stop_reason) if episode.stop_reason else "unfinished"
        return EpisodeOutcome(
            reward=episode.reward,
            score=episode.score if episode.reward is not None else None,
            passed=passed,
            stop_reason=stop,
            num_action_tokens=None if episode.num_uncounted else episode.num_action_tokens,
            failure="" if episode.reward is not None else str(episode.error_kind or stop),
            info=episode.info_last,
            cost_usd=episode.cost_usd if episode.error_kind is None else None,
            episode_id=episode.episode_id,
        )

    def settle(self, side: Side) -> None:
        """Forget which episodes passed if that turned out to be unknown."""
        if not self._passes.are_known:
            for task_id, outcomes in side.outcomes.items():
                side.outcomes[task_id] = [replace(each, passed=None) for each in outcomes]


def same_episodes(a: Side, b: Side) -> str:
    """Return in words that two sides have the same episodes: one is the other, or both are of one run, graded again."""
    if any(a.flags.get(name) != b.flags.get(name) for name in DRAWS):
        return ""
    graded = [side.config.get("rescored") for side in (a, b)]
    sources = [Path(facts["run"]).resolve() if facts else None for facts in graded]
    for new, old, source, other in (("A", "B", sources[0], b.name), ("B", "A", sources[1], a.name)):
        place = Path(other).resolve()
        if source is not None and (source == place or (source.name == place.name and not source.exists())):  # moved
            return f"{new} has the episodes of {old}, graded again: the difference is of the rewards"
    if sources[0] is not None and sources[0] == sources[1]:
        return f"A and B have the episodes of {sources[0].name}, graded again: the difference is of the rewards"
    return ""


def values_of(outcomes: Iterable[EpisodeOutcome], value: Callable[[EpisodeOutcome], float | None]) -> list[float]:
    """Return the values that outcomes have, without None."""
    return [number for each in outcomes if (number := value(each)) is not None]


# --- evaluations of a training, from its steps.jsonl ------------------------------------------------------------------


def split_step(source: str) -> tuple[str, int | None]:
    """Return the path and the train step of `RUN@STEP`; the whole and None if it names a path, or no step."""
    path, _, step = source.rpartition("@")
    return (path, int(step)) if path and step.isdigit() and not Path(source).exists() else (source, None)


def first_and_last(path: str) -> tuple[str, str]:
    """Return the first and the last evaluation of a training, as `RUN@STEP`.

    Raises:
        ConfigError: there are fewer than two.
    """
    steps = list(read_steps(Path(path), "eval"))
    if len(steps) < 2:
        raise ConfigError(
            f"{path}: expected two runs, or a training with two evaluations, got one run with {len(steps)}. "
            "Name a second run."
        )
    return f"{path}@{steps[0]}", f"{path}@{steps[-1]}"


def evaluation_at(folder: Path, step: int | None) -> Mapping[str, Any] | None:
    """Return the evaluation at a train step, or the last one for None; None without a step and an evaluation.

    Raises:
        ConfigError: the step has no evaluation.
    """
    found = read_steps(folder, "eval")
    if step is None:
        return found[max(found)] if found else None
    if step not in found:
        steps = ", ".join(map(str, found)) or "none"
        raise ConfigError(
            f"{folder}@{step}: expected a train step with an evaluation, got those of steps {steps}. Choose one."
        )
    return found[step]


def evaluated(line: Mapping[str, Any]) -> Iterator[Summary]:
    """Yield the episodes of an evaluation; their `group_id` is the task."""
    names = line["episode_fields"]
    for group in line["groups"]:
        for row in group["episodes"]:
            facts = dict(zip(names, row, strict=True))
            stop = facts["stop_reason"]
            yield Summary(
                facts["episode_id"],
                group["group_id"],
                env=group.get("env", ""),
                reward=facts["reward"],
                score=facts["score"],
                stop_reason=StopReason(stop) if stop else None,
                error_kind=facts["error"],
                num_action_tokens=facts["action_tokens"],
                info_last=facts["info"],
            )
