"""What makes two runs hard to compare: it is said first, and `--fail_if` refuses what would make a verdict wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any

from agentenv._util.plurals import counted, histogram
from agentenv.compare.sides import By, Side, same_episodes
from agentenv.runs.config import parsed_reward
from agentenv.runs.mixture import MixtureEntry, mixture_of
from agentenv.runs.prepare import changed_files, python_files

ENVIRONMENT = ("env", "env_kwargs", "agent_func_path", "history", "text_feedback")
LIMITS = (
    "max_length", "max_turns", "max_tokens", "max_observation_tokens", "long_observation", "step_timeout_s",
    "episode_timeout_s",
)  # fmt: skip
REWARDS = ("remote_rm_url", "group_reward", "reference_key", "pass_score")
EVAL_DATA = ("eval_dataset", "eval_split")
CODE = ("agent_func_path", "env", "env_kwargs", "remote_rm_url")
_UNREPORTED = (
    "out", "resume", "progress", "log_level", "json", "ckpt_path", *ENVIRONMENT, *LIMITS, *REWARDS, *EVAL_DATA,
)  # fmt: skip
_KEYS = [each.name for each in fields(MixtureEntry) if each.name != "name"]
_NUM_SHOWN = 3
_SEEDS = (
    "the verdict is about these two models: another seed of a training may make as large a difference. "
    "To judge flags, train with several seeds each"
)


@dataclass(frozen=True, slots=True)
class Caveat:
    """Something that makes the runs hard to compare."""

    kind: str
    """`environment`, `data`, `limits`, `rewards`, `tasks`, `answers`, `unrewarded`, `steps`, `seeds`, `kept`,
    `rescored` or `damage`."""
    text: str
    refuses: bool
    """True if `--fail_if` refuses it, since a verdict would not be about the model."""


def caveats_of(
    a: Side, b: Side, by: By, *, pairs: Sequence[str], only: tuple[Sequence[str], Sequence[str]]
) -> list[Caveat]:
    """Return what is to be said before the verdict.

    `pairs` are the tasks that are compared, `only` those that have a value in one run.
    """
    regraded = same_episodes(a, b)
    found = [*_flag_caveats(a, b, regraded), *_task_caveats(a, b, pairs, ([], []) if regraded else only)]
    found += _episode_caveats(a, b, by) if regraded else []
    is_one_model = bool(a.flags) and a.flags.get("model") == b.flags.get("model")
    if len(a.models) > 1 or len(b.models) > 1 or (is_one_model and a.models.keys() != b.models.keys()):
        text = f"answered by {histogram(a.models)} in A, {histogram(b.models)} in B"
        found.append(Caveat("answers", text, refuses=False))
    for name, side in (("A", a), ("B", b)):
        failures = failures_of(side)
        if failures:
            num = sum(map(len, side.outcomes.values()))
            kinds = ", ".join(f"{count} {kind}" for kind, count in failures.items())
            text = f"{sum(failures.values())} of {num} episodes of {name} have no reward: {kinds}"
            found.append(Caveat("unrewarded", text, refuses=False))
        unscored = sum(
            each.value("score") is None and not each.failure for row in side.outcomes.values() for each in row
        )
        if by == "score" and unscored:
            text = counted(unscored, f"episode of {name} has", f"episodes of {name} have")
            found.append(Caveat("unrewarded", f"{text} a reward and no score", refuses=False))
        if side.damage:
            found.append(Caveat("damage", f"{name}: {side.damage}", refuses=False))
        if side.kept:
            text = f"{name} is what a training kept of its train steps: its weights changed meanwhile"
            found.append(Caveat("kept", text, refuses=False))
    if a.training and b.training and a.training != b.training and not regraded:
        found.append(Caveat("seeds", _SEEDS, refuses=False))
    return found


def failures_of(side: Side) -> dict[str, int]:
    """Return the number of episodes without a reward by reason, the most frequent first."""
    counts = Counter(each.failure for row in side.outcomes.values() for each in row if each.failure)
    return dict(counts.most_common())


def changed_flags(a: Side, b: Side) -> dict[str, tuple[Any, Any]]:
    """Return the flags that both have with different values and that no caveat tells, with the value of each."""
    names = {name.rpartition(".")[2] for name in _by_entry(a.flags)}.difference(_UNREPORTED)
    told = dict(_differing(a.flags, b.flags, _KEYS))
    if a.step is not None and b.step is not None and a.name == b.name:  # a resume trained longer
        names -= {"max_train_steps", "num_episodes"}
    others = {name: values for name, values in _differing(a.trained, b.trained, _KEYS) if name not in told}
    return dict(_differing(a.flags, b.flags, names)) | others


def _differing(
    a: Mapping[str, Any], b: Mapping[str, Any], names: Collection[str]
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield the flags of these names, and the keys of a mixture's entries, that both have with different values."""
    a, b = _by_entry(a), _by_entry(b)
    for name in a:
        if name.rpartition(".")[2] in names and name in b and a[name] != b[name]:
            yield name, (a[name], b[name])


def _by_entry(flags: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the flags with the names of a mixture's environments as `env`, and its entries as `env.NAME.KEY`."""
    entries = mixture_of(flags)
    values = {f"env.{entry['name']}.{key}": entry.get(key) for entry in entries for key in _KEYS}
    return {**flags, "env": "+".join(sorted(entry["name"] for entry in entries)), **values} if entries else flags


def _flag_caveats(a: Side, b: Side, regraded: str) -> Iterator[Caveat]:
    graded = [(side.config.get("rescored") or {}) for side in (a, b)]
    is_meant = bool(regraded)
    if is_meant:
        yield Caveat("rescored", regraded, refuses=False)
    rewards = [facts.get("reward") for facts in graded]
    if rewards[0] != rewards[1]:
        yield Caveat("rewards", f"--reward of rescore: {rewards[0]} in A, {rewards[1]} in B", refuses=not is_meant)
    idle = [" (graded nothing)" if is_meant and reward else "" for reward in rewards]  # the environment's flags
    for kind, names in (("environment", ENVIRONMENT), ("limits", LIMITS), ("rewards", REWARDS)):
        for name, (old, new) in _differing(a.flags, b.flags, names):
            of_a, of_b = idle if kind == "environment" or name == "remote_rm_url" else ("", "")
            text = f"--{name}: {old}{of_a} in A, {new}{of_b} in B"
            yield Caveat(kind, text, refuses=kind == "limits" or not is_meant)
    files = {*python_files([side.flags.get(name) for side in (a, b) for name in CODE])}
    code = [parsed_reward("--group_reward", side.flags.get("group_reward")) for side in (a, b)]
    code += [parsed_reward("--reward", reward) for reward in rewards]
    graders = {*python_files(code)} | (set() if any(idle) else files)
    if text := _changed_code(a.config.get("agent_file"), b.config.get("agent_file"), graders):
        yield Caveat("environment", f"code: {text}", refuses=not is_meant)
    for side_name, side in (("A", a), ("B", b)):
        if mixed := ", ".join(each for each in side.mixed_files if each in graders | files):
            text = f"code: {mixed} changed before a resume of {side_name}: its episodes are of more than one version"
            yield Caveat("environment", text, refuses=not is_meant)
    if a.step is None or b.step is None:
        return  # the tasks themselves are compared
    for name, (old, new) in _differing(a.flags, b.flags, EVAL_DATA):
        yield Caveat("data", f"--{name}: {old} in A, {new} in B", refuses=True)
    if a.step != b.step and a.name != b.name:
        yield Caveat("steps", f"step {a.step} of A against step {b.step} of B", refuses=False)


def _changed_code(old: Any, new: Any, named: Collection[str]) -> str:
    """Return in words how the named files differ, from `agent_file` of two config.json; empty if they do not."""
    changes: dict[str, list[str]] = {}
    for name in changed_files(old, new):
        if name in named:
            change = "other content of {} in B"
            if (name in old) != (name in new):
                change = "{} only in A" if name in old else "{} only in B"
            changes.setdefault(change, []).append(name)
    return "; ".join(change.format(", ".join(names)) for change, names in changes.items())


def _episode_caveats(a: Side, b: Side, by: By) -> Iterator[Caveat]:
    old, new = ({each.episode_id: each.value(by) for row in side.outcomes.values() for each in row} for side in (a, b))
    for name, values, others in (("A", old, new), ("B", new, old)):
        by_reason: dict[str, list[float]] = {}
        for key, value in values.items():
            if value is not None:
                reason = "both" if others.get(key) is not None else "graded " * (key in others)
                by_reason.setdefault(reason, []).append(value)
        kept = fmean(by_reason.pop("both"))
        for how, left in by_reason.items():
            text = f"left out; mean in {name} {fmean(left):.3g}, of the others {kept:.3g}"
            yield Caveat("unrewarded", f"{counted(len(left), 'episode')} {how}only in {name}: {text}", refuses=False)


def _task_caveats(
    a: Side, b: Side, pairs: Sequence[str], only: tuple[Sequence[str], Sequence[str]]
) -> Iterator[Caveat]:
    for name, other, side, ids in (("A", "B", b, only[0]), ("B", "A", a, only[1])):
        missing = [each for each in ids if each not in side.outcomes]
        unknown = [each for each in ids if each in side.outcomes]
        if missing:
            yield Caveat("tasks", f"{_tasks(missing)} only in {name}: left out", refuses=True)
        if unknown:
            yield Caveat("tasks", f"{_tasks(unknown)} without a value in {other}: left out", refuses=True)
    others = [each for each in pairs if a.contents.get(each) != b.contents.get(each)]
    others = [each for each in others if each in a.contents and each in b.contents]
    if others:
        yield Caveat("data", f"{_tasks(others)} with another prompt or label in B", refuses=True)


def _tasks(ids: Sequence[str]) -> str:
    shown = ", ".join(ids[:_NUM_SHOWN]) + ", …" * (len(ids) > _NUM_SHOWN)
    return f"{counted(len(ids), 'task')} ({shown})"
