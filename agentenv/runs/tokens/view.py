"""`agentenv tokens show`: the tokens of an episode, on a console (`episode_view`).

Also loads what commands on the tokens of a run read: the episode (`load_episode`) and the run's tokenizer
(`load_run_tokenizer`).
"""

from __future__ import annotations

import difflib
import math
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentenv._util.plurals import counted
from agentenv._util.terminal import safe
from agentenv.chat.encoding import encoder_of
from agentenv.chat.token_text import token_texts, visible
from agentenv.core.engine import Tokenizer
from agentenv.core.trajectory import Segment, Trajectory
from agentenv.core.views import Span, spans_of
from agentenv.engines.models import load_tokenizer, resolve_model
from agentenv.errors import ConfigError
from agentenv.runs.display.conversation import SHADE_LIMITS, SPAN_TITLES, episode_line, number_text
from agentenv.runs.records.directory import read_config, read_trajectories
from agentenv.runs.records.scan import ReadReport
from agentenv.runs.records.tokenizer import kept_tokenizer

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table
    from rich.text import Text

_STYLES = {"prompt": "blue", "action": "green", "close": "black on yellow", "feedback": "cyan"}
_SHADES = ("green", "bright_green", "yellow", "dark_orange", "red")
"""Colors of action tokens by log-probability: above each of `SHADE_LIMITS`, and below."""


# --- loading ----------------------------------------------------------------------------------------------------------


def load_episode(run: str | Path, episode: str | int, *, report: ReadReport | None = None) -> Trajectory:
    """Return an episode of a run directory by its id, its index in the record (-1 is the last) or a unique prefix.

    A number is an index, also where it is the prefix of an id. `report` counts the lines, as in `read_trajectories`.

    Raises:
        ConfigError: the run or the episode does not exist, or the prefix is ambiguous; the message lists similar ids.
        DataError: the record has another schema.
    """
    wanted = str(episode)
    index = int(wanted) if re.fullmatch(r"0|-?[1-9]\d{0,8}", wanted) else None
    last: deque[Trajectory] = deque(maxlen=max(1, -(index or 0)))
    ids: list[str] = []
    at_index: Trajectory | None = None
    begins: Trajectory | None = None
    for number, trajectory in enumerate(read_trajectories(run, report=report)):
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
    matches = [key for key in ids if key.startswith(wanted)] if wanted and index is None else []
    if begins is not None and len(matches) == 1:
        return begins
    if not ids:
        raise ConfigError(f"{run}: expected episodes, got none. Check the path, or wait for the first one to end.")
    if matches:
        more = f" and {len(matches) - 5} more" if len(matches) > 5 else ""
        raise ConfigError(
            f"episode: expected one of {run}, got {wanted!r}, the prefix of {matches[:5]}{more}. Use a longer one."
        )
    near = difflib.get_close_matches(wanted, ids, n=3, cutoff=0.4) or ids[:3]
    raise ConfigError(
        f"episode: expected an id of {run}, a prefix of one, or an index from {-len(ids)} to {len(ids) - 1}, got "
        f"{wanted!r}. Similar ids: {', '.join(near)}."
    )


def load_run_tokenizer(run: str | Path, override: str | None = None) -> Tokenizer:
    """Return the tokenizer of a run; `override` names another one.

    That of the run directory is preferred: it needs neither the model nor a network.

    Raises:
        ConfigError: the run's config.json names no model, or the tokenizer cannot be loaded.
    """
    stored = read_config(run)["config"].get("flags")
    flags = stored if isinstance(stored, dict) else {}  # other code records none
    if flags.get("engine") == "chat":
        raise ConfigError(
            f"{run}: expected a run with token ids, got one recorded by --engine chat, which returns no token ids. "
            "Sample it with another engine."
        )
    model = flags.get("model")
    if kept := kept_tokenizer(Path(run)):
        return load_tokenizer(resolve_model(override) if override else str(kept))
    name = override or flags.get("tokenizer") or model
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{run}: expected a model in config.json, got {model!r}. Pass --tokenizer.")
    return load_tokenizer(resolve_model(name))


# --- console ----------------------------------------------------------------------------------------------------------


def episode_view(
    trajectory: Trajectory,
    tokenizer: Tokenizer,
    *,
    logprobs: bool = False,
    max_tokens: int | None = None,
) -> RenderableType:
    """Return an episode for a rich console: a block with a header for each span, in color if the console has any.

    Without color, an added token is in ‹ › and a synthesized close in ⟦ ⟧. ↵ is a newline, · a space at the beginning
    of a token, ⇥ a tab, and ⋯ a token with bytes of a character that a later token completes; other invisible
    characters are escaped. With `logprobs`, the tokens of actions are shaded and listed in a table. At most
    `max_tokens` of a span are shown, half from its beginning and half from its end.

    Raises:
        ConfigError: the episode has no token ids, or `max_tokens` is below 1.
    """
    trajectory.check_tokens("tokens show")
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"--max_tokens: expected a number >= 1, got {max_tokens}. Leave it out to show every token.")
    return _EpisodeView(trajectory, tokenizer, logprobs, max_tokens)


@dataclass(frozen=True, slots=True)
class _EpisodeView:
    trajectory: Trajectory
    tokenizer: Tokenizer
    logprobs: bool
    max_tokens: int | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        color = console.color_system is not None and not console.no_color
        added = encoder_of(self.tokenizer).added_ids | set(self.tokenizer.all_special_ids)
        trajectory = self.trajectory
        error = trajectory.error
        line = episode_line(trajectory)
        if error is not None:
            line += safe(f" · error in {error.where or '?'}: {error.type}: {error.message}").replace("\n", " ")
        yield Text(line, style="bold" if color else "")
        for index, segment in enumerate(trajectory.segments):
            if len(trajectory.segments) > 1:
                title = f"segment {index} of {len(trajectory.segments)} · {counted(len(segment), 'token')}"
                yield Text(title, style="bold underline" if color else "")
            texts = token_texts(self.tokenizer, segment.token_ids)
            for span in spans_of(trajectory, index):
                line = _span_line(trajectory, segment, span, texts)
                yield Text(f"\n── {line} ──", style=f"bold {_STYLES[span.kind]}" if color else "")
                yield self._body(segment, span, texts, added, color=color)
                if self.logprobs and span.kind == "action":
                    yield self._table(segment, span, texts)

    def _body(
        self, segment: Segment, span: Span, texts: Sequence[str], added: frozenset[int] | set[int], *, color: bool
    ) -> Text:
        from rich.text import Text

        body = Text("" if color or span.kind != "close" else "⟦", overflow="fold")
        for at in self._visible_indices(span):
            if at is None:
                num = span.end - span.start - (self.max_tokens or 0)
                body.append(f" … {num} tokens … ", style="dim" if color else "")
                continue
            special, text = segment.token_ids[at] in added, visible(texts[at])
            style = _STYLES[span.kind]
            if self.logprobs and span.kind == "action":
                logprob = segment.logprobs[at]
                shade = sum(logprob < limit for limit in SHADE_LIMITS)
                style = "magenta" if math.isnan(logprob) else _SHADES[shade]
            style += " reverse bold" if special else ""
            # The newline comes after the bracket, so that the bracket stays on the line of its token.
            text, newline = (text[:-1], "\n") if text.endswith("\n") else (text, "")
            text = f"‹{text}›" if special and not color else text
            body.append(text, style=style if color else "")
            body.append(newline)
        if not color and span.kind == "close":
            body.append("⟧")
        if body.plain.endswith("\n"):
            body.right_crop(1)
        return body

    def _visible_indices(self, span: Span) -> list[int | None]:
        """Return the indices of the tokens to show; None stands for the tokens left out."""
        every: list[int | None] = list(range(span.start, span.end))
        if self.max_tokens is None or len(every) <= self.max_tokens:
            return every
        head = (self.max_tokens + 1) // 2
        return [*every[:head], None, *every[len(every) - (self.max_tokens - head) :]]

    def _table(self, segment: Segment, span: Span, texts: Sequence[str]) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table("index", "id", "text", "mask", "log-prob", "policy version", box=None, header_style="bold")
        for at in self._visible_indices(span):
            if at is None:
                table.add_row("…")
                continue
            logprob = segment.logprobs[at]
            table.add_row(
                str(at), str(segment.token_ids[at]), Text(visible(texts[at]).rstrip("\n")),
                str(segment.action_mask[at]), number_text(logprob), str(segment.policy_versions[at]),
            )  # fmt: skip
        return table


def _span_line(trajectory: Trajectory, segment: Segment, span: Span, texts: Sequence[str]) -> str:
    """Return the header of a span."""
    turn = trajectory.turns[span.turn] if span.turn >= 0 else None
    parts = [*([] if turn is None else [f"turn {span.turn}"]), SPAN_TITLES[span.kind]]
    parts.append(f"tokens [{span.start}, {span.end}) = {span.end - span.start}")
    if turn is not None and span.kind == "action":
        parts.append(f"finish {turn.finish_reason}")
        if turn.matched_stop is not None:
            last = turn.matched_stop == segment.token_ids[turn.end - 1]
            stop = texts[turn.end - 1] if last else turn.matched_stop
            parts.append(f"stop reason {visible(str(stop)).replace(chr(10), '')}")
        logprobs = segment.logprobs[turn.start : turn.end]
        parts.append(f"mean log-prob {number_text(math.fsum(logprobs) / len(logprobs))}")
        parts.append(f"reward {'unknown' if turn.result is None else number_text(turn.result.reward)}")
        if turn.result is not None and turn.result.score is not None:
            parts.append(f"score {number_text(turn.result.score)}")
    elif turn is not None:
        parts.append(f"bridge {turn.bridge or 'none'}")
        if turn.num_synthesized:
            parts.append(f"{turn.num_synthesized} synthesized")
        if turn.observation_cut:
            parts.append("observation cut")
    return " · ".join(parts)
