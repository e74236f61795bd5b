"""Replay: score stored token ids again and compare with the log-probabilities that were recorded while sampling.

What an engine sampled and what it thinks of the stored ids agree to rounding, unless a token, its place or its
log-probability was changed on the way, or the weights are others. `replay` compares, `replay_run` reads a run directory
and opens the engine.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentenv.config import RunConfig, parse_json_object
from agentenv.engines import EngineName, Scorer, choose_engine, is_plain, open_engine
from agentenv.errors import ConfigError, DataError
from agentenv.loading import load_tokenizer, resolve_model
from agentenv.record import read_config, read_trajectories
from agentenv.serialize import jsonable
from agentenv.trajectory import Segment, Trajectory, Turn
from agentenv.types import SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

DEFAULT_TOLERANCE = 1e-3
"""For weights in float32, where engines differ by less than 1e-4. In bfloat16, allow 0.2: the order of sums alone was
seen to change a log-probability by 0.11, whichever engine scores."""


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
        """The absolute difference; infinite where one of the two is no finite number."""
        size = abs(self.recorded - self.scored)
        return math.inf if math.isnan(size) else size

    def __str__(self) -> str:
        """Where, and the two numbers."""
        place = f"episode {self.episode_id}, turn {self.turn}, segment {self.segment}, position {self.position}"
        return f"{place} (token {self.token_id}): recorded {self.recorded:.6g}, scored {self.scored:.6g}"


@dataclass
class ReplayReport:
    """How far the recorded log-probabilities are from those of today's weights; grows episode by episode."""

    tolerance: float
    policy_version: int = 0
    """Of the weights that score."""
    num_episodes: int = 0
    """Episodes with at least one compared token."""
    num_episodes_beyond: int = 0
    """Those of them with a difference beyond the tolerance."""
    num_turns: int = 0
    num_tokens: int = 0
    """Action tokens compared."""
    num_tokens_beyond: int = 0
    num_missing: int = 0
    """Action tokens recorded without a log-probability (NaN)."""
    num_unscored: int = 0
    """Action tokens that the scorer gave no log-probability for: the last of a sequence that fills vLLM's context."""
    num_turns_left_out: int = 0
    """Turns sampled otherwise than greedily or at temperature 1 without truncation: no prompt log-probability is
    comparable with theirs."""
    versions: Counter[int] = field(default_factory=Counter)
    """Compared tokens by the version of the policy that sampled them."""
    largest: Difference | None = None
    first: Difference | None = None
    """The first beyond the tolerance in the episode of the largest: all before it agree, so look there."""
    sizes: array[float] = field(default_factory=lambda: array("d"), repr=False)
    """[num_tokens] every absolute difference."""

    def add(self, turns: int, differences: Sequence[Difference]) -> None:
        """Take in the compared tokens of one episode, in order."""
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
        """1 when a difference is beyond the tolerance, else 0."""
        return int(self.num_tokens_beyond > 0)

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
        """Compared tokens that another version of the policy sampled than the one that scores."""
        return self.versions.total() - self.versions[self.policy_version]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, without the single differences."""
        counts = {name: value for name, value in vars(self).items() if name.startswith("num_")}
        places = {"largest": self.largest, "first": self.first}
        return {
            "exit_code": self.exit_code,
            "tolerance": self.tolerance,
            "difference": jsonable(
                {"largest": self.largest.size if self.largest else None, "mean": self.mean, "p99": self.p99}
            ),
            **counts,
            "policy_version": self.policy_version,
            "versions": {str(version): count for version, count in sorted(self.versions.items())},
            **{name: jsonable(asdict(place)) if place else None for name, place in places.items()},
        }

    def __rich__(self) -> Table:
        """The report as a table."""
        from rich.table import Table
        from rich.text import Text

        verdict = "differs" if self.exit_code else "agrees"
        table = Table(
            title=f"Replay: {verdict} (tolerance {self.tolerance:g})", title_justify="left", show_header=False
        )
        table.add_column(style="bold")
        table.add_column()
        for name, value in self._rows():
            table.add_row(name, Text(value))
        return table

    def _rows(self) -> Iterator[tuple[str, str]]:
        size = self.largest.size if self.largest else math.nan
        yield "compared", f"{self.num_episodes} episodes, {self.num_turns} turns, {self.num_tokens} action tokens"
        yield "difference", f"largest {size:.3g}, mean {self.mean:.3g}, p99 {self.p99:.3g}"
        yield "largest at", str(self.largest)
        if self.num_tokens_beyond:
            yield "beyond tolerance", f"{self.num_tokens_beyond} tokens in {self.num_episodes_beyond} episodes"
            yield "first there", str(self.first)
        if self.num_missing or self.num_unscored:
            yield "without a number", f"{self.num_missing} recorded, {self.num_unscored} scored"
        if self.num_turns_left_out:
            yield "left out", f"{self.num_turns_left_out} turns, sampled with another temperature or a truncation"
        versions = ", ".join(f"{version}: {count} tokens" for version, count in sorted(self.versions.items()))
        others = f"; scored by version {self.policy_version}, so others may differ" if self.num_other_version else ""
        yield "policy versions", versions + others


def _rank(difference: Difference) -> tuple[float, str, int, int]:
    """Which of two is reported, whatever order the episodes came in."""
    return difference.size, difference.episode_id, -difference.segment, -difference.position


async def replay(
    trajectories: Iterable[Trajectory],
    scorer: Scorer,
    *,
    sampling: SamplingParams,
    tolerance: float = DEFAULT_TOLERANCE,
    concurrency: int = 64,
) -> ReplayReport:
    """Score what was sampled again, and compare.

    Every segment is scored once, up to its last action that can be compared; episodes that failed count too, as far as
    they came.

    Args:
        trajectories: read one at a time.
        scorer: an engine with the weights that sampled.
        sampling: of the run (its flags); a step's `sampling` replaced it for the rest of its episode.
        tolerance: the largest absolute difference that passes.
        concurrency: episodes scored at once.

    Raises:
        DataError: there was nothing to compare.
        EngineError: the tokens cannot be scored.
    """
    report = ReplayReport(tolerance, getattr(scorer, "policy_version", 0))
    rest = iter(trajectories)

    async def work() -> None:
        """Replay what comes next, until nothing does."""
        for trajectory in rest:
            await _replay_episode(trajectory, scorer, sampling, report)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # one of them ended it; the others were only cancelled
    if not report.num_tokens:
        raise DataError(
            "replay: expected action tokens with log-probabilities, sampled greedily or at temperature 1 without "
            f"truncation, got none: {report.num_turns_left_out} turns were sampled otherwise, {report.num_missing} "
            f"tokens recorded and {report.num_unscored} scored without one. Replay a run of --temperature 1."
        )
    return report


async def _replay_episode(
    trajectory: Trajectory, scorer: Scorer, sampling: SamplingParams, report: ReplayReport
) -> None:
    compared: dict[int, list[tuple[int, Turn]]] = {}
    for index, turn in enumerate(trajectory.turns):
        if is_plain(sampling):
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
            raise DataError(f"replay: expected {end} scores, got {len(scores)}. Mend the scorer.")
        for index, turn in turns:
            differences += _compare(trajectory.episode_id, index, turn, segment, scores, report)
    report.add(len({each.turn for each in differences}), differences)


def _compare(
    episode_id: str, index: int, turn: Turn, segment: Segment, scores: Sequence[float], report: ReplayReport
) -> Iterator[Difference]:
    """The tokens of an action that have both numbers; the others are counted."""
    for position in range(turn.start, turn.end):
        recorded, scored = segment.logprobs[position], scores[position]
        if math.isnan(recorded):
            report.num_missing += 1
        elif math.isnan(scored):
            report.num_unscored += 1
        else:
            report.versions[segment.policy_versions[position]] += 1
            token_id = segment.token_ids[position]
            yield Difference(episode_id, index, turn.segment, position, token_id, recorded, scored)


async def replay_run(
    path: str | Path,
    *,
    engine: EngineName | None = None,
    base_url: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    engine_args: str | None = None,
    tolerance: float = DEFAULT_TOLERANCE,
    concurrency: int = 64,
) -> ReplayReport:
    """Replay a run directory on an engine that is opened as `agentenv run` opens it.

    What is None is the run's own. Its `engine_args` are taken over only for the engine that it ran on.

    Raises:
        ConfigError: there is no run, a flag is wrong, or the engine cannot score.
        DataError: there was nothing to compare.
    """
    config, ran_on = _flags(path)
    base_url = config.base_url if base_url is None else base_url
    name = choose_engine(engine or ran_on, base_url=base_url)
    if engine_args is None:
        engine_args = config.engine_args if name == ran_on else "{}"
    model = resolve_model(config.model)
    async with open_engine(
        name,
        model,
        load_tokenizer(resolve_model(config.tokenizer) if config.tokenizer else model),
        base_url=base_url,
        device=device or config.device,
        dtype=dtype or _dtype(config, ran_on),
        args=_with_context(parse_json_object("--engine_args", engine_args), name, model, config.max_length),
    ) as scorer:
        if not isinstance(scorer, Scorer):
            raise ConfigError(f"--engine: expected one that scores, got {name!r}. Use hf, vllm_local or vllm_http.")
        return await replay(
            read_trajectories(path), scorer, sampling=config.sampling, tolerance=tolerance, concurrency=concurrency
        )


def _flags(path: str | Path) -> tuple[RunConfig, EngineName]:
    """The flags of a run, and the engine that it ran on."""
    stored: Mapping[str, Any] = read_config(path)["config"]
    if "load_checkpoint" in stored.get("flags", {}):
        raise ConfigError(
            f"{path}: expected a run, got a training, whose tokens come from weights that changed. "
            "Replay a run of its model: `agentenv run --model` with the model folder in it."
        )
    try:
        flags: Mapping[str, Any] = stored["flags"]
        known = {key: tuple(value) if isinstance(value, list) else value for key, value in flags.items()}
        engine: EngineName = stored["resolved"]["engine"]
        # What sampled was inside Ray's actors; to score once, one engine in this process does.
        return RunConfig(**known), flags["engine_backend"] if engine == "ray" else engine  # type: ignore[arg-type]
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: expected the flags of `agentenv run` in its config.json, got {error!r}. "
            "Replay it with the agentenv that wrote it."
        ) from error


def _dtype(config: RunConfig, ran_on: str) -> str:
    """What the run computed in, as far as that is known: hf's "auto" is float32 on a CPU, where vLLM's is not."""
    import torch

    on_cpu = config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available())
    return "float32" if config.dtype == "auto" and ran_on == "hf" and on_cpu else config.dtype


def _with_context(args: dict[str, Any], name: str, model: str, max_length: int) -> dict[str, Any]:
    """The engine's arguments with a context in which an episode fits; vLLM samples one token after it."""
    from transformers import AutoConfig

    if name == "hf":
        return {"max_length": max_length, **args}
    if name != "vllm_local":
        return args
    known = getattr(AutoConfig.from_pretrained(model).get_text_config(), "max_position_embeddings", None)
    return {"max_model_len": min(max_length + 1, known or max_length), **args}
