"""`agentenv tokens show`: the tokens of one recorded episode, for people (`episode_view`), as JSON (`episode_to_json`).

Also what every command on the tokens of a run needs: the episode (`load_episode`), the run's tokenizer
(`load_run_tokenizer`) and what else its chat template was given (`load_run_variables`).
"""

from __future__ import annotations

import difflib
import math
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentenv.agent import Tokenizer
from agentenv.config import parse_json_object
from agentenv.encoding import encoder_of
from agentenv.errors import ConfigError
from agentenv.loading import load_stop_token_ids, load_tokenizer, resolve_model
from agentenv.record import read_config, read_trajectories
from agentenv.tokens.text import escaped, token_texts, visible
from agentenv.trajectory import Segment, Span, Trajectory, Turn

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table
    from rich.text import Text

_TITLES = {"prompt": "prompt", "action": "action", "close": "synthesised close", "feedback": "feedback"}
_STYLES = {"prompt": "blue", "action": "green", "close": "black on yellow", "feedback": "cyan"}
_SHADES = ("green", "bright_green", "yellow", "dark_orange", "red")
"""Of actions' tokens, by log-probability: above -0.1, -1, -3, -6, and below."""


# --- what is shown: an episode of a run, and its tokenizer ------------------------------------------------------------


def load_episode(run: str | Path, episode: str | int) -> Trajectory:
    """An episode of a run directory by its id, its index in the record (-1 is the last) or a prefix that only it has.

    Raises:
        ConfigError: there is no such run, no such episode, or several begin like this; near ids are named.
        DataError: the record is of a newer schema.
    """
    wanted = str(episode)
    index = int(wanted) if re.fullmatch(r"0|-?[1-9]\d{0,8}", wanted) else None
    last: deque[Trajectory] = deque(maxlen=max(1, -(index or 0)))
    ids: list[str] = []
    at_index: Trajectory | None = None
    begins: Trajectory | None = None
    for number, trajectory in enumerate(read_trajectories(run)):
        if trajectory.episode_id == wanted:
            return trajectory
        ids.append(trajectory.episode_id)
        last.append(trajectory)
        at_index = trajectory if number == index else at_index
        begins = trajectory if begins is None and trajectory.episode_id.startswith(wanted) else begins
    if index is not None and index < 0 and len(ids) >= -index:
        return last[0]
    if at_index is not None:
        return at_index
    matches = [key for key in ids if key.startswith(wanted)] if wanted else []
    if begins is not None and len(matches) == 1:
        return begins
    raise ConfigError(_no_episode(run, wanted, ids, matches))


def _no_episode(run: str | Path, wanted: str, ids: Sequence[str], matches: Sequence[str]) -> str:
    if not ids:
        return f"{run}: expected episodes, got none. Check the path, or wait for the first one to end."
    if matches:
        more = f" and {len(matches) - 5} more" if len(matches) > 5 else ""
        return (
            f"episode: expected one of {run}, got {wanted!r}, with which {matches[:5]}{more} begin. Write more of it."
        )
    near = difflib.get_close_matches(wanted, ids, n=3, cutoff=0.4) or list(ids[:3])
    return (
        f"episode: expected an id of {run}, the beginning of one, or an index from {-len(ids)} to {len(ids) - 1}, got "
        f"{wanted!r}. Near ids: {', '.join(near)}."
    )


def load_run_tokenizer(run: str | Path, override: str | None = None) -> tuple[Tokenizer, tuple[int, ...]]:
    """The tokenizer a run was made with, and the ids on which its engine stopped; `override` names another tokenizer.

    Raises:
        ConfigError: the run's config.json names no model, or the tokenizer cannot be loaded.
    """
    flags = _flags(run)
    model = flags.get("model") or flags.get("pretrain")  # of a run, of a training
    name = override or flags.get("tokenizer") or model
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{run}: expected a model in config.json, got {model!r}. Name it with --tokenizer.")
    stops = load_stop_token_ids(resolve_model(model)) if isinstance(model, str) and model else ()
    return load_tokenizer(resolve_model(name)), stops


def load_run_variables(run: str | Path) -> dict[str, Any]:
    """The further variables that a run gave its chat template (`--chat_template_kwargs`).

    Raises:
        ConfigError: config.json cannot be read, or what it has there is no JSON object.
    """
    return parse_json_object("--chat_template_kwargs", str(_flags(run).get("chat_template_kwargs") or "{}"))


def _flags(run: str | Path) -> dict[str, Any]:
    """What `agentenv run` was called with; empty for a run that other code recorded."""
    flags = read_config(run)["config"].get("flags")
    return flags if isinstance(flags, dict) else {}


# --- for programs -----------------------------------------------------------------------------------------------------


def episode_to_json(
    trajectory: Trajectory, tokenizer: Tokenizer, *, segment: int | None = None, max_tokens: int | None = None
) -> dict[str, Any]:
    """An episode as JSON values: its spans, with ids and the text of each token.

    Actions have a log-probability (None where it is missing) and a policy version for each token. At most `max_tokens`
    of a span are listed, its first; `start` and `end` say how many there are.

    Raises:
        ConfigError: there is no such segment, or `max_tokens` is below 1.
    """
    _check(trajectory, segment, max_tokens)
    return {
        "episode_id": trajectory.episode_id,
        "group_id": trajectory.group_id,
        "stop_reason": None if trajectory.stop_reason is None else trajectory.stop_reason.value,
        "reward": trajectory.reward,
        "score": trajectory.score,
        "error": None if trajectory.error is None else trajectory.error.message,
        "segments": [
            {
                "segment": index,
                "num_tokens": len(trajectory.segments[index]),
                "spans": [
                    _span_to_json(trajectory, index, span, texts, max_tokens) for span in trajectory.spans(index)
                ],
            }
            for index in _segments(trajectory, segment)
            for texts in [token_texts(tokenizer, trajectory.segments[index].token_ids)]
        ],
    }


def _span_to_json(
    trajectory: Trajectory, index: int, span: Span, texts: Sequence[str], max_tokens: int | None
) -> dict[str, Any]:
    segment, turn = trajectory.segments[index], trajectory.turns[span.turn] if span.turn >= 0 else None
    end = span.end if max_tokens is None else min(span.end, span.start + max_tokens)
    values: dict[str, Any] = {
        "kind": span.kind,
        "turn": span.turn,
        "start": span.start,
        "end": span.end,
        "text": "".join(texts[span.start : end]),
        "token_ids": segment.token_ids[span.start : end].tolist(),
        "tokens": list(texts[span.start : end]),
    }
    if turn is not None and span.kind == "action":
        result = turn.result
        values["finish_reason"], values["stop_reason"] = turn.finish_reason, turn.stop_reason
        values["reward"], values["score"] = (None, None) if result is None else (result.reward, result.score)
        values["logprobs"] = [_finite(value) for value in segment.logprobs[span.start : end]]
        values["policy_versions"] = segment.policy_versions[span.start : end].tolist()
    elif turn is not None:
        values["bridge"], values["num_synthesised"] = turn.bridge, turn.num_synthesised
        values["observation_cut"] = turn.observation_cut
    return values


def _finite(value: float) -> float | None:
    return float(f"{value:.9g}") if math.isfinite(value) else None


def _check(trajectory: Trajectory, segment: int | None, max_tokens: int | None) -> None:
    number = len(trajectory.segments)
    if segment is not None and not 0 <= segment < number:
        raise ConfigError(f"--segment: expected one of 0 to {number - 1}, got {segment}. The episode has no more.")
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"--max_tokens: expected a number >= 1, got {max_tokens}. Leave it out to show every token.")


def _segments(trajectory: Trajectory, segment: int | None) -> list[int]:
    return list(range(len(trajectory.segments))) if segment is None else [segment]


# --- for people -------------------------------------------------------------------------------------------------------


def episode_view(
    trajectory: Trajectory,
    tokenizer: Tokenizer,
    *,
    logprobs: bool = False,
    max_tokens: int | None = None,
    segment: int | None = None,
) -> RenderableType:
    """An episode for a rich console: a block for each span of tokens, with a header; colours where there are any.

    Without colours an added token is in ‹ ›, and a close that was put in the model's place in ⟦ ⟧. ↵ is a newline, · a
    space with which a token begins, ⇥ a tab, ⋯ a token with bytes of a character that a later one completes, and other
    characters that cannot be seen are escaped. With `logprobs` the tokens of actions are shaded and listed in a table.
    Of a span's tokens at most `max_tokens` are shown, the first and the last.

    Raises:
        ConfigError: there is no such segment, or `max_tokens` is below 1.
    """
    _check(trajectory, segment, max_tokens)
    return _EpisodeView(trajectory, tokenizer, logprobs, max_tokens, segment)


@dataclass(frozen=True, slots=True)
class _EpisodeView:
    trajectory: Trajectory
    tokenizer: Tokenizer
    logprobs: bool
    max_tokens: int | None
    segment: int | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        colour = console.color_system is not None and not console.no_color
        trajectory = self.trajectory
        yield Text(_episode_line(trajectory), style="bold" if colour else "")
        for index in _segments(trajectory, self.segment):
            segment = trajectory.segments[index]
            if len(trajectory.segments) > 1:
                title = f"segment {index} of {len(trajectory.segments)} · {len(segment)} tokens"
                yield Text(title, style="bold underline" if colour else "")
            yield from self._segment(index, colour=colour)

    def _segment(self, index: int, *, colour: bool) -> Iterator[RenderableType]:
        from rich.text import Text

        segment = self.trajectory.segments[index]
        texts = token_texts(self.tokenizer, segment.token_ids)
        added = encoder_of(self.tokenizer).added_ids | set(self.tokenizer.all_special_ids)
        for span in self.trajectory.spans(index):
            line = _span_line(self.trajectory, segment, span, texts)
            yield Text(f"\n── {line} ──", style=f"bold {_STYLES[span.kind]}" if colour else "")
            yield self._body(segment, span, texts, added, colour=colour)
            if self.logprobs and span.kind == "action":
                yield self._table(segment, span, texts)

    def _body(
        self, segment: Segment, span: Span, texts: Sequence[str], added: frozenset[int] | set[int], *, colour: bool
    ) -> Text:
        from rich.text import Text

        body = Text("" if colour or span.kind != "close" else "⟦", overflow="fold")
        for at in self._shown(span):
            if at is None:
                num = span.end - span.start - (self.max_tokens or 0)
                body.append(f" … {num} tokens … ", style="dim" if colour else "")
                continue
            special, shown = segment.token_ids[at] in added, visible(texts[at])
            style = _STYLES[span.kind]
            if self.logprobs and span.kind == "action":
                style = _shade(segment.logprobs[at])
            style += " reverse bold" if special else ""
            # A line ends after the bracket, so that it stays beside its token.
            shown, newline = (shown[:-1], "\n") if shown.endswith("\n") else (shown, "")
            shown = f"‹{shown}›" if special and not colour else shown
            body.append(shown, style=style if colour else "")
            body.append(newline)
        if not colour and span.kind == "close":
            body.append("⟧")
        if body.plain.endswith("\n"):
            body.right_crop(1)
        return body

    def _shown(self, span: Span) -> list[int | None]:
        """Indices of the tokens to show; None where some are left out."""
        every: list[int | None] = list(range(span.start, span.end))
        if self.max_tokens is None or len(every) <= self.max_tokens:
            return every
        head = (self.max_tokens + 1) // 2
        return [*every[:head], None, *every[len(every) - (self.max_tokens - head) :]]

    def _table(self, segment: Segment, span: Span, texts: Sequence[str]) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table("index", "id", "text", "mask", "log-prob", "policy version", box=None, header_style="bold")
        for at in self._shown(span):
            if at is None:
                table.add_row("…")
                continue
            logprob = segment.logprobs[at]
            table.add_row(
                str(at), str(segment.token_ids[at]), Text(visible(texts[at]).rstrip("\n")),
                str(segment.action_mask[at]), _number(logprob), str(segment.policy_versions[at]),
            )  # fmt: skip
        return table


def _shade(logprob: float) -> str:
    if math.isnan(logprob):
        return "magenta"
    return _SHADES[sum(logprob < limit for limit in (-0.1, -1.0, -3.0, -6.0))]


def _number(value: float | None) -> str:
    return "unknown" if value is None else "missing" if math.isnan(value) else f"{value:.4g}"


def _episode_line(trajectory: Trajectory) -> str:
    parts = [
        f"episode {trajectory.episode_id}",
        f"stop reason {'none' if trajectory.stop_reason is None else trajectory.stop_reason.value}",
        f"reward {_number(trajectory.reward)}",
        *([] if trajectory.score is None else [f"score {_number(trajectory.score)}"]),
        f"{len(trajectory.turns)} turns",
        f"{trajectory.num_tokens} tokens",
    ]
    if trajectory.error is not None:
        parts.append(f"error in {trajectory.error.where or '?'}: {trajectory.error.type}: {trajectory.error.message}")
    return escaped(" · ".join(parts)).replace("\n", " ")


def _span_line(trajectory: Trajectory, segment: Segment, span: Span, texts: Sequence[str]) -> str:
    """The header of a span."""
    turn = trajectory.turns[span.turn] if span.turn >= 0 else None
    parts = [*([] if turn is None else [f"turn {span.turn}"]), _TITLES[span.kind]]
    parts.append(f"tokens [{span.start}, {span.end}) = {span.end - span.start}")
    if turn is not None and span.kind == "action":
        parts += _action_parts(turn, segment, texts)
    elif turn is not None:
        parts.append(f"bridge {turn.bridge or 'none'}")
        if turn.num_synthesised:
            parts.append(f"{turn.num_synthesised} synthesised")
        if turn.observation_cut:
            parts.append("observation cut")
    return " · ".join(parts)


def _action_parts(turn: Turn, segment: Segment, texts: Sequence[str]) -> Iterator[str]:
    yield f"finish {turn.finish_reason}"
    if turn.stop_reason is not None:
        last = turn.stop_reason == segment.token_ids[turn.end - 1]
        stop = texts[turn.end - 1] if last else turn.stop_reason
        yield f"stop reason {visible(str(stop)).replace(chr(10), '')}"
    logprobs = segment.logprobs[turn.start : turn.end]
    yield f"mean log-prob {_number(math.fsum(logprobs) / len(logprobs))}"
    if turn.result is None:
        yield "reward unknown"
    else:
        yield f"reward {_number(turn.result.reward)}"
        if turn.result.score is not None:
            yield f"score {_number(turn.result.score)}"
