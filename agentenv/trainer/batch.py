"""From trajectories to a batch, and from a batch to micro-batches that a model can run.

Shapes: S sequences (segments that are trained on), T tokens of one, N action tokens of the batch, n of a micro-batch,
B×T a micro-batch's tokens: padded rows, or one row in which sequences stand one after the other (packed).

A sequence is a segment up to its last action: what comes after was never acted on. The model's output at one place
predicts the token at the next, so the place that predicts an action token is the one before it; no action stands at
place 0, a Segment refuses that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from agentenv.errors import DataError
from agentenv.trainer.advantages import ActionTokens
from agentenv.trajectory import Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """All that a train step learns from, on one axis of action tokens."""

    sequences: tuple[Tensor, ...]
    """S of int64[T]: the tokens the model reads."""
    tokens: ActionTokens
    token_ids_N: Tensor
    """int64[N] the tokens that were sampled."""
    sequence_N: Tensor
    """int64[N] which sequence, from 0, ascending."""
    place_N: Tensor
    """int64[N] where in its sequence; never 0."""
    logprobs_N: Tensor
    """float32[N] of the engine; NaN where missing."""
    policy_versions_N: Tensor
    """int64[N] of the weights that sampled a token."""
    trained_N: Tensor
    """bool[N] False for actions that are in no loss: a log-probability was needed and is missing."""
    truncated_E: Tensor
    """bool[E] something other than the task ended the episode."""
    episode_ids: tuple[str, ...]
    """E of them."""
    num_failed: int
    """Episodes that were left out because they have no reward."""

    @property
    def num_dropped_tokens(self) -> int:
        """Action tokens in no loss."""
        return int((~self.trained_N).sum())


def build(trajectories: Iterable[Trajectory], *, need_logprobs: bool = False) -> Batch:
    """The batch of the episodes that have a reward; failed ones are left out and counted, never given a number.

    With `need_logprobs` (a correction, or a ratio against the engine) an action with a missing log-probability is in
    no loss, all its tokens; its reward still reaches the earlier turns.

    Raises:
        DataError: an episode still runs.
    """
    good, num_failed = [], 0
    for trajectory in trajectories:
        if trajectory.stop_reason is None:
            raise DataError("batch.build: expected episodes that ended, got one that still runs. Finish it first.")
        good += [] if trajectory.reward is None else [trajectory]
        num_failed += trajectory.reward is None
    acted = [(e, s) for e, t in enumerate(good) for s in sorted({turn.segment for turn in t.turns})]
    columns = [_columns(good[episode], segment, need_logprobs=need_logprobs) for episode, segment in acted]
    joined = [torch.cat(c) for c in zip(*columns, strict=True)] if columns else list(_columns_of_nothing())
    counts = torch.tensor([len(column[0]) for column in columns], dtype=torch.int64)
    place_N, turn_N, rewards_N, logprobs_N, versions_N, trained_N, token_ids_N = joined
    episode_S = torch.tensor([episode for episode, _ in acted], dtype=torch.int64)
    sequences = tuple(_sequence(good[episode], segment) for episode, segment in acted)
    return Batch(
        sequences=sequences,
        tokens=ActionTokens(episode_S.repeat_interleave(counts), turn_N, rewards_N, _groups(good)),
        token_ids_N=token_ids_N,
        sequence_N=torch.arange(len(acted)).repeat_interleave(counts),
        place_N=place_N,
        logprobs_N=logprobs_N,
        policy_versions_N=versions_N,
        trained_N=trained_N,
        truncated_E=torch.tensor([trajectory.truncated for trajectory in good], dtype=torch.bool),
        episode_ids=tuple(trajectory.episode_id for trajectory in good),
        num_failed=num_failed,
    )


def _groups(trajectories: Sequence[Trajectory]) -> Tensor:
    """int64[E] a number for each group; an episode that names no group is one of its own."""
    numbers: dict[str | int, int] = {}
    keys = [trajectory.group_id or index for index, trajectory in enumerate(trajectories)]
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys], dtype=torch.int64)


def _sequence(trajectory: Trajectory, segment: int) -> Tensor:
    end = max(turn.end for turn in trajectory.turns if turn.segment == segment)
    return torch.tensor(trajectory.segments[segment].token_ids[:end].tolist(), dtype=torch.int64)


def _columns_of_nothing() -> tuple[Tensor, ...]:
    kinds = (torch.int64, torch.int64, torch.float64, torch.float32, torch.int64, torch.bool, torch.int64)
    return tuple(torch.empty(0, dtype=kind) for kind in kinds)


def _columns(trajectory: Trajectory, segment: int, *, need_logprobs: bool) -> tuple[Tensor, ...]:
    """Place, turn, reward, log-probability, version, trained, token id of a segment's action tokens."""
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
    lacking = torch.unique(turn_n[logprobs_n.isnan()])
    trained_n = ~torch.isin(turn_n, lacking) if need_logprobs else torch.ones(len(place_n), dtype=torch.bool)
    return place_n, turn_n, rewards_n, logprobs_n, versions_n, trained_n, token_ids_n


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Whole sequences that go through the model together."""

    sequences: tuple[int, ...]
    """Which of the batch's."""
    input_ids_BT: Tensor
    attention_mask_BT: Tensor | None
    """1 on tokens; None when packed: the positions tell where a sequence begins."""
    position_ids_BT: Tensor
    """int64, from 0 in every sequence."""
    predicts_n: Tensor
    """int64[n] index into the B·T places of the one whose output predicts an action token."""
    token_ids_n: Tensor
    """int64[n] the tokens that were sampled there."""
    sequence_n: Tensor
    """int64[n] which sequence of the micro-batch, from 0."""
    index_n: Tensor
    """int64[n] index of the token in the batch's N: `advantages_N[index_n]`."""
    last_s: Tensor
    """int64[s] index into the B·T places of each sequence's last token, which is an action's."""

    def to(self, device: torch.device) -> MicroBatch:
        """The same with all its tensors on a device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in values.items()}
        return MicroBatch(**moved)

    @property
    def packed(self) -> bool:
        """Whether sequences stand one after the other in one row."""
        return self.attention_mask_BT is None

    @property
    def num_places(self) -> int:
        """B·T: what the model computes."""
        return self.input_ids_BT.numel()


def micro_batches(
    batch: Batch,
    *,
    max_tokens: int,
    packed: bool,
    pad_token_id: int = 0,
    max_sequences: int | None = None,
    sequences: Sequence[int] | None = None,
) -> list[MicroBatch]:
    """Micro-batches of at most `max_tokens` places, long sequences first; a longer sequence is alone in its own.

    With `max_sequences` none has more sequences than that.

    Every trained action token is in exactly one; sequences without one are left out. To split a micro-batch that did
    not fit into memory, give its `sequences` and a smaller budget: the loss does not change.
    """
    trained = set(torch.unique(batch.sequence_N[batch.trained_N]).tolist())
    wanted = trained if sequences is None else trained.intersection(sequences)
    ordered = sorted(wanted, key=lambda s: (-len(batch.sequences[s]), s))
    most = max_sequences or len(ordered)
    plan = _pack(batch, ordered, max_tokens, most) if packed else _pad(batch, ordered, max_tokens, most)
    return [_micro_batch(batch, rows, packed=packed, pad_token_id=pad_token_id) for rows in plan]


def _pack(batch: Batch, ordered: Sequence[int], max_tokens: int, max_sequences: int) -> list[list[int]]:
    """First fit of the longest first: at most 22 % more rows than the best there is, plus one (by tokens alone)."""
    plan: list[list[int]] = []
    room: list[int] = []
    for sequence in ordered:
        length = len(batch.sequences[sequence])
        fit = next((i for i, left in enumerate(room) if left >= length), None)
        if fit is None:
            plan.append([])
            room.append(max_tokens)
            fit = len(plan) - 1
        plan[fit].append(sequence)
        room[fit] = room[fit] - length if len(plan[fit]) < max_sequences else 0
    return plan


def _pad(batch: Batch, ordered: Sequence[int], max_tokens: int, max_sequences: int) -> list[list[int]]:
    """Neighbours by length: the first is the longest, which is what all rows are padded to."""
    plan: list[list[int]] = []
    for sequence in ordered:
        rows = len(plan[-1]) + 1 if plan else 0
        if 0 < rows <= max_sequences and rows * len(batch.sequences[plan[-1][0]]) <= max_tokens:
            plan[-1].append(sequence)
        else:
            plan.append([sequence])
    return plan


def _micro_batch(batch: Batch, rows: Sequence[int], *, packed: bool, pad_token_id: int) -> MicroBatch:
    inputs = [batch.sequences[row] for row in rows]
    lengths = [len(ids) for ids in inputs]
    positions = [torch.arange(length) for length in lengths]
    if packed:
        input_ids_BT, position_ids_BT = torch.cat(inputs)[None], torch.cat(positions)[None]
        attention_mask_BT, starts = None, [sum(lengths[:row]) for row in range(len(rows))]
    else:
        input_ids_BT = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True, padding_value=pad_token_id)
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


def plain(record: Any) -> dict[str, Any]:
    """A dataclass of tensors as dicts and lists of them on the CPU: what `torch.load(weights_only=True)` takes."""
    found: dict[str, Any] = {}
    for name in (field.name for field in fields(record)):
        value = getattr(record, name)
        if isinstance(value, Tensor):
            value = value.detach().cpu()
        elif is_dataclass(value):
            value = plain(value)
        found[name] = list(value) if isinstance(value, tuple) else value
    return found
