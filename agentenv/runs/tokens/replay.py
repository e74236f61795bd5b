"""Replay: score stored token ids again and compare with the log-probabilities that were recorded while sampling.

They agree up to rounding unless a token, its position or its log-probability was changed, or the weights differ.
`replay` compares; `replay_run` reads a run directory and opens the engine.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentenv._util.jsonable import jsonable
from agentenv._util.plurals import counted
from agentenv.core.engine import Engine, is_plain
from agentenv.core.trajectory import Trajectory, Turn
from agentenv.core.types import SamplingParams
from agentenv.engines.factory import choose_engine
from agentenv.engines.models import load_tokenizer, resolve_model
from agentenv.engines.opening import open_engine
from agentenv.errors import ConfigError, DataError
from agentenv.runs.config import RunConfig
from agentenv.runs.records.directory import read_config, read_trajectories
from agentenv.runs.records.scan import ReadReport

if TYPE_CHECKING:
    from rich.table import Table

DEFAULT_TOLERANCE = 1e-3
"""For weights in float32, where engines differ by less than 1e-4. In bfloat16, allow 0.2: the order of summation
alone changed a log-probability by 0.11 in tests with each engine."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One action token whose log-probability was recorded as one number and scored as another."""

    episode_id: str
    turn: int
    segment: int
    position: int
    """In `segments[segment].token_ids`."""
    token_id: int
    recorded: float
    scored: float

    @property
    def size(self) -> float:
        """The absolute difference; infinite if one of the two is not a finite number."""
        size = abs(self.recorded - self.scored)
        return math.inf if math.isnan(size) else size

    def __str__(self) -> str:
        """Return the place and the two numbers."""
        place = f"episode {self.episode_id}, turn {self.turn}, segment {self.segment}, position {self.position}"
        return f"{place} (token {self.token_id}): recorded {self.recorded:.6g}, scored {self.scored:.6g}"


@dataclass
class ReplayReport:
    """Differences between recorded and new log-probabilities; grows with each episode."""

    tolerance: float
    policy_version: int = 0
    """Policy version of the weights that score."""
    record: ReadReport = field(default_factory=ReadReport)
    """Lines of the record; episodes of those that are damaged were not compared."""
    num_episodes: int = 0
    """Episodes with at least one compared token."""
    num_episodes_beyond: int = 0
    """Episodes with a difference beyond the tolerance."""
    num_turns: int = 0
    num_tokens: int = 0
    """Action tokens compared."""
    num_tokens_beyond: int = 0
    num_missing: int = 0
    """Action tokens recorded without a log-probability (NaN)."""
    num_unscored: int = 0
    """Action tokens that were scored without a log-probability: the last of a sequence that fills vLLM's context."""
    num_turns_left_out: int = 0
    """Turns not sampled greedily or at temperature 1 without truncation: their log-probabilities are not comparable
    with those of a prompt."""
    versions: Counter[int] = field(default_factory=Counter)
    """Compared tokens by the version of the policy that sampled them."""
    largest: Difference | None = None
    first: Difference | None = None
    """The first difference beyond the tolerance in the episode of the largest; all tokens before it agree."""
    sizes: array[float] = field(default_factory=lambda: array("d"), repr=False)
    """[num_tokens] all absolute differences."""

    def add(self, turns: int, differences: Sequence[Difference]) -> None:
        """Add the compared tokens of one episode, in order."""
        if not differences:
            return
        beyond = [each for each in differences if each.size > self.tolerance]
        self.num_episodes += 1
        self.num_episodes_beyond += bool(beyond)
        self.num_turns += turns
        self.num_tokens += len(differences)
        self.num_tokens_beyond += len(beyond)
        self.sizes.extend(each.size for each in differences)
        largest = max(differences, key=lambda each: each.size)
        if self.largest is None or _rank(largest) > _rank(self.largest):
            self.largest, self.first = largest, beyond[0] if beyond else None

    @property
    def exit_code(self) -> int:
        """1 when a difference is beyond the tolerance or a line of the record is damaged, else 0."""
        return int(self.num_tokens_beyond > 0 or bool(self.record.damage))

    @property
    def mean(self) -> float:
        """Mean absolute difference."""
        return sum(self.sizes) / len(self.sizes) if self.sizes else math.nan

    @property
    def p99(self) -> float:
        """The absolute difference that 99 % of the tokens do not exceed."""
        return sorted(self.sizes)[math.ceil(0.99 * len(self.sizes)) - 1] if self.sizes else math.nan

    @property
    def num_other_version(self) -> int:
        """Compared tokens that were sampled by a policy version other than the one that scores."""
        return self.versions.total() - self.versions[self.policy_version]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values, without the individual differences."""
        counts = {name: value for name, value in vars(self).items() if name.startswith("num_")}
        places = {"largest": self.largest, "first": self.first}
        return {
            "exit_code": self.exit_code,
            "tolerance": self.tolerance,
            "difference": jsonable(
                {"largest": self.largest.size if self.largest else None, "mean": self.mean, "p99": self.p99}
            ),
            **counts,
            "num_damaged_lines": len(self.record.corrupt_lines) + (self.record.torn_bytes > 0),
            "policy_version": self.policy_version,
            "versions": {str(version): count for version, count in sorted(self.versions.items())},
            **{name: jsonable(asdict(place)) if place else None for name, place in places.items()},
        }

    def __rich__(self) -> Table:
        """Return the report as a table."""
        from rich.table import Table
        from rich.text import Text

        verdict = "differs" if self.num_tokens_beyond else "incomplete" if self.record.damage else "agrees"
        table = Table(
            title=f"Replay: {verdict} (tolerance {self.tolerance:g})", title_justify="left", show_header=False
        )
        table.add_column(style="bold")
        table.add_column()
        size = self.largest.size if self.largest else math.nan
        num_turns, num_tokens = counted(self.num_turns, "turn"), counted(self.num_tokens, "action token")
        rows = {
            "compared": f"{counted(self.num_episodes, 'episode')}, {num_turns}, {num_tokens}",
            "difference": f"largest {size:.3g}, mean {self.mean:.3g}, p99 {self.p99:.3g}",
            "largest at": str(self.largest),
        }
        if self.num_tokens_beyond:
            rows["beyond tolerance"] = (
                f"{counted(self.num_tokens_beyond, 'token')} in {counted(self.num_episodes_beyond, 'episode')}"
            )
            rows["first there"] = str(self.first)
        if self.num_missing or self.num_unscored:
            rows["without a number"] = f"{self.num_missing} recorded, {self.num_unscored} scored"
        if self.num_turns_left_out:
            rows["left out"] = (
                f"{counted(self.num_turns_left_out, 'turn')}, sampled with another temperature or a truncation"
            )
        if self.record.damage:
            rows["record"] = self.record.damage
        versions = ", ".join(
            f"{version}: {counted(count, 'token')}" for version, count in sorted(self.versions.items())
        )
        others = f"; scored by version {self.policy_version}, so others may differ" if self.num_other_version else ""
        rows["policy versions"] = versions + others
        for name, value in rows.items():
            table.add_row(name, Text(value))
        return table


def _rank(difference: Difference) -> tuple[float, str, int, int]:
    """Return a sort key, so that the reported difference does not depend on the order of the episodes."""
    return difference.size, difference.episode_id, -difference.segment, -difference.position


async def replay(
    trajectories: Iterable[Trajectory],
    scorer: Engine,
    *,
    sampling: SamplingParams,
    tolerance: float = DEFAULT_TOLERANCE,
    concurrency: int = 64,
    record: ReadReport | None = None,
) -> ReplayReport:
    """Score sampled tokens again, and compare.

    Every segment is scored once, up to its last comparable action. Failed episodes count up to their end.

    Args:
        trajectories: episodes, read one at a time.
        scorer: an engine with the weights that sampled.
        sampling: sampling parameters of the run; the `sampling` of a step replaces them for the rest of its episode.
        tolerance: largest permitted absolute difference.
        concurrency: maximum number of episodes scored concurrently.
        record: the lines from which `trajectories` are read.

    Raises:
        DataError: the record has no comparable token.
        EngineError: the tokens cannot be scored.
    """
    report = ReplayReport(tolerance, getattr(scorer, "policy_version", 0), record or ReadReport())
    rest = iter(trajectories)

    async def work() -> None:
        for trajectory in rest:
            await _replay_episode(trajectory, scorer, sampling, report)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the first error; the other tasks were cancelled
    if not report.num_tokens:
        raise DataError(
            "replay: expected action tokens with log-probabilities, sampled greedily or at temperature 1 without "
            f"truncation, got none: {report.num_turns_left_out} turns were sampled otherwise, {report.num_missing} "
            f"tokens recorded and {report.num_unscored} scored without one. "
            f"{report.record.damage and report.record.damage + '. '}Replay a run of --temperature 1."
        )
    return report


async def _replay_episode(
    trajectory: Trajectory, scorer: Engine, sampling: SamplingParams, report: ReplayReport
) -> None:
    compared: dict[int, list[tuple[int, Turn]]] = {}
    for index, turn in enumerate(trajectory.turns):
        if is_plain(sampling) and turn.forced is None:
            compared.setdefault(turn.segment, []).append((index, turn))
        else:
            report.num_turns_left_out += 1
        if turn.result is not None and turn.result.sampling is not None:
            sampling = turn.result.sampling
    differences: list[Difference] = []
    for number, turns in compared.items():
        segment, end = trajectory.segments[number], turns[-1][1].end
        scores = await scorer.score(segment.token_ids[:end].tolist())
        if len(scores) != end:
            raise DataError(f"replay: expected {end} scores, got {len(scores)}. Fix the scorer.")
        for index, turn in turns:
            for position in range(turn.start, turn.end):
                recorded, scored = segment.logprobs[position], scores[position]
                if math.isnan(recorded):
                    report.num_missing += 1
                elif math.isnan(scored):
                    report.num_unscored += 1
                else:
                    report.versions[segment.policy_versions[position]] += 1
                    at = (index, turn.segment, position, segment.token_ids[position])
                    differences.append(Difference(trajectory.episode_id, *at, recorded, scored))
    report.add(len({each.turn for each in differences}), differences)


async def replay_run(
    path: str | Path,
    *,
    engine: str | None = None,
    base_url: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    engine_args: Mapping[str, Any] | None = None,
    tolerance: float = DEFAULT_TOLERANCE,
    concurrency: int = 64,
) -> ReplayReport:
    """Replay a run directory on an engine that is opened as in `agentenv run`.

    An argument that is None is taken from the run; `engine_args` only if the engine is the same.

    Raises:
        ConfigError: the run does not exist, a flag is wrong, or the engine cannot score.
        DataError: the record has no comparable token.
    """
    config, ran_on = _flags(path)
    base_url = config.base_url if base_url is None else base_url
    name = choose_engine(engine or ran_on, base_url=base_url)
    if engine_args is None:
        engine_args = config.engine_args if name == ran_on else {}
    model = resolve_model(config.model)
    if dtype is None:
        import torch

        # The data type of the run, if known: "auto" is float32 on a CPU with hf, but not with vLLM.
        on_cpu = config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available())
        dtype = "float32" if config.dtype == "auto" and ran_on == "hf" and on_cpu else config.dtype
    # One that fits each episode.
    recorded = (each.max_length for each in read_trajectories(path, report=ReadReport()))
    max_length = max(recorded, default=config.limits.for_env().max_length)
    context = {"max_length": max_length} if name == "hf" else {}
    if name == "vllm_local":
        from transformers import AutoConfig

        known = getattr(AutoConfig.from_pretrained(model).get_text_config(), "max_position_embeddings", None)
        context = {"max_model_len": min(max_length + 1, known or max_length)}  # vLLM samples one more token
    async with open_engine(
        name,
        model,
        load_tokenizer(resolve_model(config.tokenizer) if config.tokenizer else model),
        base_url=base_url,
        device=device or config.device,
        dtype=dtype,
        args=context | dict(engine_args),
    ) as scorer:
        record = ReadReport()
        return await replay(
            read_trajectories(path, report=record),
            scorer,
            sampling=config.sampling,
            tolerance=tolerance,
            concurrency=concurrency,
            record=record,
        )


def _flags(path: str | Path) -> tuple[RunConfig, str]:
    """Return the flags of a run and its engine."""
    stored: Mapping[str, Any] = read_config(path)["config"]
    if "max_train_steps" in stored.get("flags", {}):
        raise ConfigError(
            f"{path}: expected a run of `agentenv run`, got a training run, whose weights changed. "
            "Replay a run of its model: `agentenv run --model` with the model folder in it."
        )
    if stored.get("flags", {}).get("engine") == "chat":
        raise ConfigError(
            f"{path}: expected a run with token ids, got one recorded by --engine chat, which returns no token ids. "
            "Replay a run of another engine."
        )
    try:
        flags: Mapping[str, Any] = stored["flags"]
        engine: str = stored["resolved"]["engine"]
        # Ray actors sampled, but one engine in this process is enough to score.
        return RunConfig.from_flags(**flags), flags["engine_backend"] if engine == "ray" else engine
    except (KeyError, TypeError, ConfigError) as error:
        raise ConfigError(
            f"{path}: expected the flags of `agentenv run` in its config.json, got {error!r}. "
            "Replay it with the agentenv version that wrote it."
        ) from error
