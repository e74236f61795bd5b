"""The report of `agentenv tokens diff` on the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentenv.chat.token_text import visible
from agentenv.runs.tokens.diff import Mismatch

if TYPE_CHECKING:
    from rich.console import RenderableType

_SHOWN = 160
"""Characters shown at each end of a long text or template line."""


def diff_view(mismatches: Sequence[Mismatch]) -> RenderableType:
    """Return the mismatches for a rich console, with one block each."""
    from rich.text import Text

    if not mismatches:
        return Text("No mismatch: the recorded tokens equal those of the conversation rendered again.")
    view = Text(overflow="fold")
    for number, one in enumerate(mismatches, 1):
        message = "no message" if one.message is None else f"message {one.message} ({one.role})"
        segment = f"segment {one.segment}, " if one.segment else ""
        line = "unknown" if one.line is None else f"{one.line}: {_cropped(one.template_line)}"
        place = f"{segment}tokens [{one.start}, {one.start + len(one.our_ids)})"
        view.append(f"{number}. {one.kind}", style="bold yellow").append(f" · {message} · {place}\n")
        view.append(f"   template line  {line}\n", style="dim")
        for name, text, ids in (("recorded", one.ours, one.our_ids), ("rendered", one.theirs, one.their_ids)):
            content = _cropped(visible(text).replace("\n", "")) if ids else "nothing"
            listed = ", ".join(map(str, ids[:12])) + (f", … {len(ids)} in all" if len(ids) > 12 else "")
            view.append(f"   {name}       {content}  [{listed}]\n")
        view.append(f"   between        {_inline(one.before)} … {_inline(one.after)}\n", style="dim")
    total = ", ".join(f"{kind} {number}" for kind, number in Counter(one.kind for one in mismatches).items())
    return view.append(f"{len(mismatches)} mismatches: {total}", style="bold")


def _cropped(line: str) -> str:
    """Return a text or a template line, which may be very long, without its middle."""
    return line if len(line) <= 2 * _SHOWN else f"{line[:_SHOWN]} … {line[-_SHOWN:]} ({len(line)} characters)"


def _inline(text: str) -> str:
    return visible(text).replace("\n", "") if text else "nothing"
