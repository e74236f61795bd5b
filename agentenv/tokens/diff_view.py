"""The mismatches of `agentenv tokens diff`, for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentenv.tokens.diff import Mismatch
from agentenv.tokens.text import visible

if TYPE_CHECKING:
    from rich.console import RenderableType

_SHOWN = 160
"""Characters shown of a template's line and of a text."""


def diff_view(mismatches: Sequence[Mismatch]) -> RenderableType:
    """The mismatches for a rich console: one block each, or that there are none."""
    from rich.text import Text

    if not mismatches:
        return Text("No mismatch: the recorded tokens are those of the conversation rendered anew.")
    view = Text(overflow="fold")
    for number, one in enumerate(mismatches, 1):
        message = "no message" if one.message is None else f"message {one.message} ({one.role})"
        segment = f"segment {one.segment}, " if one.segment else ""
        line = "unknown" if one.line is None else f"{one.line}: {_cropped(one.template_line)}"
        place = f"{segment}tokens [{one.start}, {one.start + len(one.our_ids)})"
        view.append(f"{number}. {one.kind}", style="bold yellow").append(f" · {message} · {place}\n")
        view.append(f"   template line  {line}\n", style="dim")
        for name, text, ids in (("recorded", one.ours, one.our_ids), ("rendered", one.theirs, one.their_ids)):
            shown = _cropped(visible(text).replace("\n", "")) if ids else "nothing"
            view.append(f"   {name}       {shown}  {_listed(ids)}\n")
        view.append(f"   between        {_inline(one.before)} … {_inline(one.after)}\n", style="dim")
    total = ", ".join(f"{kind} {number}" for kind, number in Counter(one.kind for one in mismatches).items())
    return view.append(f"{len(mismatches)} mismatches: {total}", style="bold")


def _listed(ids: Sequence[int]) -> str:
    return f"[{', '.join(map(str, ids[:12]))}{f', … {len(ids)} in all' if len(ids) > 12 else ''}]"


def _cropped(line: str) -> str:
    """A line of a template that may be written all in one, or a text that was cut out."""
    return line if len(line) <= 2 * _SHOWN else f"{line[:_SHOWN]} … {line[-_SHOWN:]} ({len(line)} characters)"


def _inline(text: str) -> str:
    return visible(text).replace("\n", "") if text else "nothing"
