"""The tokenizer of episodes that are played in text and messages: a character is a token, so nothing is lost or cut.

No model is behind these modes, but the loop counts tokens all the same: `max_length` is in characters then.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from agentenv.chat import Chat, text_of

CLOSE, OPEN = "<|im_end|>", "<|im_start|>"
_FIRST_SPECIAL = sys.maxunicode + 1
_SPECIALS = {CLOSE: _FIRST_SPECIAL, OPEN: _FIRST_SPECIAL + 1}
_NAMES = {i: name for name, i in _SPECIALS.items()}
_HANDLER = "agentenv.gym.plain_text"
_SPLIT = re.compile(f"({re.escape(CLOSE)}|{re.escape(OPEN)})")
NUM_TOKENS = _FIRST_SPECIAL + len(_SPECIALS)
_CODE = next(code for code in "IL" if array(code).itemsize == 4)
_UTF_32 = f"utf-32-{sys.byteorder[0]}e"


class PlainTextTokenizer:
    """Every character is the token of its code point; a ChatML template with tools, calls and results of tools.

    A lone surrogate becomes U+FFFD: no model's tokenizer could ever say one.
    """

    eos_token_id: int | None = _SPECIALS[CLOSE]
    chat_template: Any = "chatml with tools"

    def __init__(self) -> None:
        self.all_special_ids = list(_SPECIALS.values())

    def __len__(self) -> int:
        """The size of the vocabulary."""
        return NUM_TOKENS

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to ids; the two special strings become one id each."""
        if "<|im_" not in text:
            return _points(text)
        ids: list[int] = []
        for piece in _SPLIT.split(text):
            special = _SPECIALS.get(piece)
            ids += _points(piece) if special is None else [special]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        """Ids to text."""
        ids = [i for i in token_ids if i < _FIRST_SPECIAL] if skip_special_tokens else token_ids
        return array(_CODE, ids).tobytes().decode(_UTF_32, _HANDLER)

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False, tools: Any = None,
        **_: Any,
    ) -> str:  # fmt: skip
        """ChatML; tools are a system message of their own, before the others."""
        head = f"{OPEN}system\n{tools_text(tools)}{CLOSE}\n" if tools else ""
        turns = "".join(f"{OPEN}{message['role']}\n{_said(message)}{CLOSE}\n" for message in conversation)
        return head + turns + (f"{OPEN}assistant\n" if add_generation_prompt else "")


@functools.cache
def plain_text_chat() -> Chat:
    """The one `Chat` of this process over a `PlainTextTokenizer`."""
    return Chat(PlainTextTokenizer())


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """The tools that are offered, as text: how to call one, and a schema on each line."""
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    form = '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
    return f"You may call these tools:\n<tools>\n{schemas}\n</tools>\nCall one by saying:\n{form}"


def _said(message: Mapping[str, Any]) -> str:
    text = text_of(message)
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        written = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
        text += f"{chr(10) if text else ''}<tool_call>\n{written}\n</tool_call>"
    return text


def _special(error: UnicodeError) -> tuple[str, int]:
    """What stands for four bytes that are no character: a special token's text."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    end = error.start + 4
    return _NAMES.get(int.from_bytes(error.object[error.start : end], sys.byteorder), "\ufffd"), end


codecs.register_error(_HANDLER, _special)  # so that a whole text is decoded at the speed of C


def _points(text: str) -> list[int]:
    try:
        encoded = text.encode(_UTF_32)
    except UnicodeEncodeError:
        encoded = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode(_UTF_32)
    return array(_CODE, encoded).tolist()
