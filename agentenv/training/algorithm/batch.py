"""Build batches from trajectories, and micro-batches from batches.

Shapes: S sequences (segments that are trained on), T tokens of a sequence, N action tokens of the batch, n of a
micro-batch, B×T places of a micro-batch: padded rows, or one row of concatenated sequences (packed).

Action tokens are picked here, in `build`: `_columns` takes the spans of a segment's turns, and every later tensor has
one entry per action token, in padded and packed batches alike. Nothing is multiplied by a mask, so observations cannot
reach a loss, not even as NaN.

A sequence is a segment up to its last action. The model's output at one place predicts the token at the next place, so
an action token is predicted at the place before it. A Segment refuses an action at place 0.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from agentenv.core.trajectory import Trajectory
from agentenv.errors import DataError
from agentenv.runs.records.steps import TrainedEpisode
from agentenv.runs.records.token_stats import TokenStats, hash_actions
from agentenv.training.algorithm.advantages import ActionTokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Everything that a train step learns from, on one axis of action tokens."""

    sequences: tuple[Tensor, ...]
    """S tensors int64[T]: the tokens that the model reads."""
    tokens: ActionTokens
    token_ids_N: Tensor
    """int64[N] the sampled tokens."""
    sequence_N: Tensor
    """int64[N] index of the sequence, from 0, ascending."""
    place_N: Tensor
    """int64[N] position in its sequence; never 0."""
    logprobs_N: Tensor
    """float32[N] the engine's log-probabilities; NaN if missing."""
    policy_versions_N: Tensor
    """int64[N] version of the weights that sampled the token."""
    trained_N: Tensor
    """bool[N] False for tokens that are left out of the loss: those that a constraint forced, and all of an action in
    which a needed log-probability is missing."""
    forced_N: Tensor
    """bool[N] True for tokens that a constraint forced."""
    constrained_N: Tensor
    """bool[N] True for all tokens of an action under a constraint: their engine's log-probabilities are not the
    model's own, and differ from the learner's."""
    truncated_E: Tensor
    """bool[E] True if a limit ended the episode."""
    cut_E: Tensor
    """bool[E] True if the token limit cut the last action, however the episode ended."""
    episode_ids: tuple[str, ...]
    """E ids."""
    num_failed: int
    """Episodes that were left out because they do not have a reward."""

    @property
    def num_dropped_tokens(self) -> int:
        """Action tokens that are left out of the loss because a log-probability is missing."""
        return int((~self.trained_N & ~self.forced_N).sum())


@dataclass(frozen=True, slots=True, eq=False)
class LearnedTokens:
    """What a train step computed of the action tokens of its batch."""

    advantages_N: Tensor
    """float32[N] as trained."""
    logprobs_N: Tensor
    """float32[N] the policy's log-probabilities before the step; NaN for tokens that are left out of the loss."""


def learned_episodes(batch: Batch, learned: LearnedTokens, version: int) -> dict[str, TrainedEpisode]:
    """Return what a train step made of each episode of a batch, by id; `version` is that of its weights."""
    tokens, found = batch.tokens, {}
    counts = torch.bincount(tokens.episode_N, minlength=len(batch.episode_ids)).tolist()
    columns = (learned.advantages_N, tokens.turn_N, version - batch.policy_versions_N, batch.trained_N,
               (learned.logprobs_N - batch.logprobs_N).abs())  # fmt: skip
    for episode_id, *parts in zip(batch.episode_ids, *(torch.split(column, counts) for column in columns), strict=True):
        advantages_n, turn_n, ages_n, trained_n, difference_n = parts
        known_n = difference_n[trained_n & ~difference_n.isnan()]
        found[episode_id] = TrainedEpisode(
            advantages=tuple(
                float(f"{float(advantages_n[turn_n == turn].double().mean()):.6g}")
                for turn in torch.unique(turn_n).tolist()
            ),
            staleness_min=int(ages_n.min()),
            staleness_max=int(ages_n.max()),
            trained_tokens=int(trained_n.sum()),
            logprob_diff=float(f"{float(known_n.double().mean()):.4g}") if len(known_n) else None,
        )
    return found


def token_stats(batch: Batch, learned: LearnedTokens, step: int, episodes: Container[str]) -> Iterator[TokenStats]:
    """Yield what a train step computed for the tokens of some episodes of a batch, which are named by their ids."""
    counts = torch.bincount(batch.tokens.episode_N, minlength=len(batch.episode_ids)).tolist()
    columns = (batch.token_ids_N, learned.logprobs_N, learned.advantages_N)
    for episode_id, *parts in zip(batch.episode_ids, *(torch.split(column, counts) for column in columns), strict=True):
        if episode_id in episodes:
            token_ids, logprobs, advantages = (part.tolist() for part in parts)
            yield TokenStats(step, episode_id, hash_actions(token_ids), logprobs, advantages)


def build(trajectories: Iterable[Trajectory], *, need_logprobs: bool = False) -> Batch:
    """Return the batch of the episodes that have a reward. Failed episodes are counted and left out.

    With `need_logprobs` (for a correction) all tokens of an action
    with a missing log-probability are left out of the loss, with a warning; its reward still reaches earlier turns.
    Tokens that a constraint forced are always left out: they were not chosen.

    Raises:
        DataError: an episode has not ended, or has no token ids.
    """
    good, num_failed = [], 0
    for trajectory in trajectories:
        if trajectory.stop_reason is None:
            raise DataError("batch.build: expected episodes that ended, got one that still runs. Finish it first.")
        trajectory.check_tokens("batch.build")
        if trajectory.reward is None:
            num_failed += 1
        else:
            good.append(trajectory)
    acted = [(e, s) for e, t in enumerate(good) for s in sorted({turn.segment for turn in t.turns})]
    columns = [_columns(good[episode], segment, need_logprobs=need_logprobs) for episode, segment in acted]
    flags = (torch.bool, torch.bool, torch.bool)
    dtypes = (torch.int64, torch.int64, torch.float64, torch.float32, torch.int64, torch.int64, *flags)
    joined = [torch.cat(c) for c in zip(*columns, strict=True)] or [torch.empty(0, dtype=dtype) for dtype in dtypes]
    counts = torch.tensor([len(column[0]) for column in columns], dtype=torch.int64)
    place_N, turn_N, rewards_N, logprobs_N, versions_N, token_ids_N, complete_N, forced_N, constrained_N = joined
    episode_S = torch.tensor([episode for episode, _ in acted], dtype=torch.int64)
    sequences = []
    for episode, segment in acted:
        end = max(turn.end for turn in good[episode].turns if turn.segment == segment)
        sequences.append(torch.tensor(good[episode].segments[segment].token_ids[:end].tolist(), dtype=torch.int64))
    if num_lost := int((~complete_N).sum()):
        logger.warning(
            "batch: left out %d of %d action tokens; the engine returned no log-probability for %d",
            num_lost, len(complete_N), int(logprobs_N.isnan().sum()),
        )  # fmt: skip
    # The index of each episode's group. An episode without a group id is its own group.
    numbers: dict[str | int, int] = {}
    keys = [trajectory.group_id or index for index, trajectory in enumerate(good)]
    group_E = torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys], dtype=torch.int64)
    return Batch(
        sequences=tuple(sequences),
        tokens=ActionTokens(episode_S.repeat_interleave(counts), turn_N, rewards_N, group_E),
        token_ids_N=token_ids_N,
        sequence_N=torch.arange(len(acted)).repeat_interleave(counts),
        place_N=place_N,
        logprobs_N=logprobs_N,
        policy_versions_N=versions_N,
        trained_N=complete_N & ~forced_N,
        forced_N=forced_N,
        constrained_N=constrained_N,
        truncated_E=torch.tensor([trajectory.truncated for trajectory in good], dtype=torch.bool),
        cut_E=torch.tensor([trajectory.turns[-1].finish_reason == "length" for trajectory in good], dtype=torch.bool),
        episode_ids=tuple(trajectory.episode_id for trajectory in good),
        num_failed=num_failed,
    )


def _columns(trajectory: Trajectory, segment: int, *, need_logprobs: bool) -> tuple[Tensor, ...]:
    """Return place, turn, reward, log-probability, version, token id, complete, forced and constrained of a segment's
    action tokens.

    The places are the spans of its turns, which are those where the segment's action mask is True.
    """
    record = trajectory.segments[segment]
    turns = [(index, turn) for index, turn in enumerate(trajectory.turns) if turn.segment == segment]
    counts = torch.tensor([turn.end - turn.start for _, turn in turns])
    place_n = torch.cat([torch.arange(turn.start, turn.end) for _, turn in turns])
    rewards_n = torch.zeros(len(place_n), dtype=torch.float64)
    results = [turn.result.reward for _, turn in turns if turn.result is not None]
    rewards_n[counts.cumsum(0) - 1] = torch.tensor(results, dtype=torch.float64)
    turn_n = torch.tensor([index for index, _ in turns]).repeat_interleave(counts)
    logprobs_n = torch.tensor(record.logprobs.tolist(), dtype=torch.float32)[place_n]
    versions_n = torch.tensor(record.policy_versions.tolist(), dtype=torch.int64)[place_n]
    token_ids_n = torch.tensor(record.token_ids.tolist(), dtype=torch.int64)[place_n]
    incomplete = torch.unique(turn_n[logprobs_n.isnan()])
    complete_n = ~torch.isin(turn_n, incomplete) if need_logprobs else torch.ones(len(place_n), dtype=torch.bool)
    forced = [place for _, turn in turns for place in turn.forced_places]
    forced_n = torch.isin(place_n, torch.tensor(forced, dtype=torch.int64))
    constrained = [index for index, turn in turns if turn.forced is not None]
    constrained_n = torch.isin(turn_n, torch.tensor(constrained, dtype=torch.int64))
    return place_n, turn_n, rewards_n, logprobs_n, versions_n, token_ids_n, complete_n, forced_n, constrained_n


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Whole sequences that go through the model together."""

    sequences: tuple[int, ...]
    """Indices of the batch's sequences."""
    input_ids_BT: Tensor
    attention_mask_BT: Tensor | None
    """1 on tokens, 0 on padding. None if packed: positions show where a sequence begins."""
    position_ids_BT: Tensor
    """int64, from 0 in every sequence."""
    predicts_n: Tensor
    """int64[n] index into the B·T places: the place that predicts the action token."""
    token_ids_n: Tensor
    """int64[n] the action tokens."""
    sequence_n: Tensor
    """int64[n] index of the sequence in the micro-batch, from 0."""
    index_n: Tensor
    """int64[n] index of the token in the batch's N: `advantages_N[index_n]`."""
    last_s: Tensor
    """int64[s] index into the B·T places: each sequence's last token, which is an action token."""

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy with all tensors on a device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in values.items()}
        return MicroBatch(**moved)

    @property
    def packed(self) -> bool:
        """True if all sequences are in one row."""
        return self.attention_mask_BT is None

    @property
    def num_places(self) -> int:
        """B·T, the number of places that the model computes."""
        return self.input_ids_BT.numel()


def micro_batches(
    batch: Batch,
    *,
    max_places: int,
    packed: bool,
    max_sequences: int | None = None,
    sequences: Sequence[int] | None = None,
) -> list[MicroBatch]:
    """Return micro-batches of at most `max_places` places (padding included), long sequences first.

    A longer sequence gets its own micro-batch. `max_sequences` bounds the number of sequences per micro-batch. Every
    trained action token is in exactly one micro-batch; sequences without one are left out. To split a micro-batch that
    did not fit into memory, pass its `sequences` and a smaller `max_places`; the loss does not change.
    """
    trained = set(torch.unique(batch.sequence_N[batch.trained_N]).tolist())
    wanted = trained if sequences is None else trained.intersection(sequences)
    ordered = sorted(wanted, key=lambda s: (-len(batch.sequences[s]), s))
    most = max_sequences or len(ordered)
    plan = _pack(batch, ordered, max_places, most) if packed else _pad(batch, ordered, max_places, most)
    return [_micro_batch(batch, rows, packed=packed) for rows in plan]


def _pack(batch: Batch, ordered: Sequence[int], max_places: int, max_sequences: int) -> list[list[int]]:
    """Pack by first fit, longest first: by tokens alone at most 22 % more rows than the optimum, plus one."""
    plan: list[list[int]] = []
    room: list[int] = []
    for sequence in ordered:
        length = len(batch.sequences[sequence])
        fit = next((i for i, left in enumerate(room) if left >= length), None)
        if fit is None:
            plan.append([])
            room.append(max_places)
            fit = len(plan) - 1
        plan[fit].append(sequence)
        room[fit] = room[fit] - length if len(plan[fit]) < max_sequences else 0
    return plan


def _pad(batch: Batch, ordered: Sequence[int], max_places: int, max_sequences: int) -> list[list[int]]:
    """Group sequences of similar length: all rows are padded to the first, the longest."""
    plan: list[list[int]] = []
    for sequence in ordered:
        rows = len(plan[-1]) + 1 if plan else 0
        if 0 < rows <= max_sequences and rows * len(batch.sequences[plan[-1][0]]) <= max_places:
            plan[-1].append(sequence)
        else:
            plan.append([sequence])
    return plan


def _micro_batch(batch: Batch, rows: Sequence[int], *, packed: bool) -> MicroBatch:
    inputs = [batch.sequences[row] for row in rows]
    lengths = [len(ids) for ids in inputs]
    positions = [torch.arange(length) for length in lengths]
    if packed:
        input_ids_BT, position_ids_BT = torch.cat(inputs)[None], torch.cat(positions)[None]
        attention_mask_BT, starts = None, [sum(lengths[:row]) for row in range(len(rows))]
    else:
        input_ids_BT = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True)
        position_ids_BT = torch.nn.utils.rnn.pad_sequence(positions, batch_first=True)
        width = input_ids_BT.shape[1]
        attention_mask_BT = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
        starts = [row * width for row in range(len(rows))]
    begins = torch.searchsorted(batch.sequence_N, torch.tensor(rows)).tolist()
    ends = torch.searchsorted(batch.sequence_N, torch.tensor(rows), right=True).tolist()
    indices = [i + batch.trained_N[i:end].nonzero()[:, 0] for i, end in zip(begins, ends, strict=True)]
    index_n = torch.cat(indices)
    sequence_n = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(index) for index in indices]))
    return MicroBatch(
        sequences=tuple(rows),
        input_ids_BT=input_ids_BT,
        attention_mask_BT=attention_mask_BT,
        position_ids_BT=position_ids_BT,
        predicts_n=torch.tensor(starts)[sequence_n] + batch.place_N[index_n] - 1,
        token_ids_n=batch.token_ids_N[index_n],
        sequence_n=sequence_n,
        index_n=index_n,
        last_s=torch.tensor(starts) + torch.tensor(lengths) - 1,
    )


def to_cpu_dict(record: Any) -> dict[str, Any]:
    """Return a dataclass of tensors as dicts and lists on the CPU, which `torch.load(weights_only=True)` can load."""
    content: dict[str, Any] = {}
    for name in (field.name for field in fields(record)):
        value = getattr(record, name)
        if isinstance(value, Tensor):
            value = value.detach().cpu()
        elif is_dataclass(value):
            value = to_cpu_dict(value)
        content[name] = list(value) if isinstance(value, tuple) else value
    return content
