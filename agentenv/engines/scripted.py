"""An engine without a model: it says what its script says, with the failures of real engines on demand; and a
tokenizer without a model, for which a character is a token.
"""

from __future__ import annotations

import asyncio
import codecs
import importlib
import inspect
import json
import math
import random
import re
import sys
from array import array
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentenv.chat.chat import text_of
from agentenv.chat.tool_roles import tools_text
from agentenv.core.engine import Engine, EngineOptions, Tokenizer
from agentenv.core.types import Completion, FinishReason, SamplingParams
from agentenv.errors import ConfigError, EngineError

Reply = str | Sequence[int] | Completion | Exception
"""One generation: text (the terminator is added), token ids as they are, a whole Completion, or an error to raise."""
Latency = float | Callable[["Request"], float]
"""Seconds that a generation takes, or a function of the request; `agentenv.testing.simulation` has distributions."""
Script = Iterable[Reply] | Callable[["Request"], Reply | Awaitable[Reply]]

CLOSE, OPEN = "<|im_end|>", "<|im_start|>"
_FIRST_SPECIAL = sys.maxunicode + 1
_SPECIALS = {CLOSE: _FIRST_SPECIAL, OPEN: _FIRST_SPECIAL + 1}
_NAMES = {i: name for name, i in _SPECIALS.items()}
_HANDLER = "agentenv.engines.scripted"
_SPLIT = re.compile(f"({re.escape(CLOSE)}|{re.escape(OPEN)})")
NUM_TOKENS = _FIRST_SPECIAL + len(_SPECIALS)
PLAIN_TEXT = b'{"tokenizer_class": "PlainTextTokenizer"}'
"""`tokenizer.json` of a kept PlainTextTokenizer, which has no vocabulary to write."""
_CONFIG = "tokenizer_config.json"
_CODE = next(code for code in "IL" if array(code).itemsize == 4)
_UTF_32 = f"utf-32-{sys.byteorder[0]}e"


@dataclass(frozen=True, slots=True)
class Request:
    """One call of `generate`, as the script sees it and as `ScriptedEngine.requests` keeps it."""

    prompt_token_ids: tuple[int, ...]
    """The whole history, as tokens."""
    sampling: SamplingParams
    """Parameters of this generation."""
    request_id: str
    """`<episode_id>/<turn>`."""
    call_index: int
    """Number of earlier calls of the engine."""
    tokenizer: Tokenizer = field(repr=False)
    """The engine's."""

    @property
    def prompt(self) -> str:
        """The whole history, as text; decoded when it is read, which in a long episode costs more than a turn."""
        return self.tokenizer.decode(self.prompt_token_ids)

    @property
    def turn_index(self) -> int:
        """Turn within the episode, from the request id."""
        return int(self.request_id.rpartition("/")[2]) if "/" in self.request_id else 0

    @property
    def episode_id(self) -> str:
        """The request id without its turn."""
        return self.request_id.rpartition("/")[0] or self.request_id


class ScriptedEngine(Engine):
    """An engine that plays a script: the same request always returns the same tokens.

    The script is a list (turn i of every episode says item i, the last item repeats) or a callable of the request.

    Example::

        ScriptedEngine(["I think 41.", "#### 42"], tokenizer)
        ScriptedEngine(solves(0.5, right="#### 42", wrong="#### 41"), tokenizer, latency_s=0.01, crash_at=7)
    """

    is_light = True
    constraint_problem = ""
    """A script follows a structural tag by itself; a test may set a reason why it cannot."""

    def __init__(
        self,
        script: Script,
        tokenizer: Tokenizer | None = None,
        *,
        latency_s: Latency = 0.0,
        finish_reason: FinishReason | None = None,
        crash_at: int | Iterable[int] = (),
        logprob: float = -0.5,
        policy_version: int = 0,
        keeps_requests: bool = True,
    ) -> None:
        """Set the script and what goes wrong.

        Args:
            script: what to say.
            tokenizer: encodes text replies; by default a `PlainTextTokenizer`.
            latency_s: seconds that a generation takes; a number, or a function of the request.
            finish_reason: forced on every completion; None derives it ("length" where `max_tokens` cut it).
            crash_at: indices of calls that raise EngineError, counted over the engine's life.
            logprob: of every token; `math.nan` for an engine that lost them.
            policy_version: of every token.
            keeps_requests: False leaves `requests` empty: they grow with the square of an episode's turns.

        Raises:
            ConfigError: the script is a text, or has no reply.
        """
        self.script = script if callable(script) else list(script)
        if isinstance(script, str) or not self.script:
            raise ConfigError(f"ScriptedEngine.script: expected replies in a list, got {script!r:.60}. Give it some.")
        self.tokenizer: Tokenizer = tokenizer or PlainTextTokenizer()
        self.latency_s, self.finish_reason = latency_s, finish_reason
        self.crash_at = frozenset([crash_at] if isinstance(crash_at, int) else crash_at)
        self.logprob, self.policy_version = logprob, policy_version
        self.requests: list[Request] = []
        self._keeps_requests, self._num_calls = keeps_requests, 0
        self.num_cancelled = 0
        self.closed = False

    @classmethod
    def from_options(cls, options: EngineOptions) -> ScriptedEngine:
        """See `Engine`. `script` may name a function, `module:function`."""
        args = {"tokenizer": options.tokenizer, "keeps_requests": False, **options.args}
        script = args.pop("script", ["#### 42"])
        if isinstance(script, str):
            module, _, function = script.partition(":")
            try:
                script = getattr(importlib.import_module(module), function)
            except (ImportError, AttributeError, ValueError) as error:
                raise ConfigError(
                    f"--engine_args: script: expected a list of replies or module:function, got {script!r}: {error}."
                ) from error
        return cls(script, **args)

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Say the script's next words; see `Engine`."""
        request = Request(tuple(prompt_token_ids), sampling, request_id, self._num_calls, self.tokenizer)
        self._num_calls += 1
        if self._keeps_requests:
            self.requests.append(request)
        try:
            await asyncio.sleep(self.latency_s(request) if callable(self.latency_s) else self.latency_s)
            if request.call_index in self.crash_at:
                raise EngineError(
                    f"ScriptedEngine: expected to sample, got a crash at call {request.call_index}. Retry."
                )
            if callable(self.script):
                reply: Any = self.script(request)
            else:
                reply = self.script[min(request.turn_index, len(self.script) - 1)]
            if inspect.isawaitable(reply):
                reply = await reply
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, Completion):
            return reply
        if isinstance(reply, str):
            eos = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
            token_ids = self.tokenizer.encode(reply, add_special_tokens=False) + eos
        else:
            token_ids = list(reply)
        reason: FinishReason = "stop"
        if sampling.max_tokens is not None and len(token_ids) > sampling.max_tokens:
            token_ids, reason = token_ids[: sampling.max_tokens], "length"
        completion = Completion(
            tuple(token_ids), reason, logprobs=(self.logprob,) * len(token_ids), policy_version=self.policy_version,
            forced=None if sampling.structural_tag is None or self.constraint_problem else (),
        )  # fmt: skip
        return replace(completion, finish_reason=self.finish_reason) if self.finish_reason else completion

    async def update_weights(self, named_tensors: Iterable[tuple[str, Any]], policy_version: int) -> None:
        """Set the version of the tokens sampled from now on; the script does not change."""
        self.policy_version = policy_version

    async def close(self) -> None:
        """Nothing is held; remembered for tests."""
        self.closed = True


def solves(probability: float, *, right: str, wrong: str, seed: int = 0) -> Callable[[Request], str]:
    """Return a script that says `right` with a probability, drawn from `seed`, the request's id and sampling seed."""
    if not 0.0 <= probability <= 1.0 or math.isnan(probability):
        raise ValueError(f"solves: expected a probability in [0, 1], got {probability!r}.")

    def script(request: Request) -> str:
        draw = random.Random(f"{seed}/{request.request_id}/{request.sampling.seed}").random()
        return right if draw < probability else wrong

    return script


class PlainTextTokenizer:
    """A tokenizer in which each character's token is its code point, with a ChatML template that renders tools.

    A lone surrogate becomes U+FFFD: no model's tokenizer can produce one.
    """

    eos_token_id: int | None = _SPECIALS[CLOSE]

    def __init__(self, chat_template: str | None = "chatml with tools") -> None:
        """Offer ChatML, or with None no chat template."""
        self.chat_template: Any = chat_template
        self.all_special_ids = list(_SPECIALS.values())
        self.added_tokens_decoder = _NAMES

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> PlainTextTokenizer:
        """Load what `save_pretrained` wrote."""
        return cls(json.loads((Path(folder) / _CONFIG).read_text("utf-8"))["chat_template"])

    def save_pretrained(self, folder: str | Path) -> None:
        """Write which tokenizer this is, for readers of a run."""
        Path(folder).mkdir(parents=True)
        (Path(folder) / "tokenizer.json").write_bytes(PLAIN_TEXT)
        config = {**json.loads(PLAIN_TEXT), "chat_template": self.chat_template}
        (Path(folder) / _CONFIG).write_text(json.dumps(config), "utf-8")

    def __len__(self) -> int:
        """Return the size of the vocabulary."""
        return NUM_TOKENS

    def __call__(self, text: str, *, return_tensors: str | None = None, **_: Any) -> dict[str, Any]:
        """Return the ids of a text as `input_ids`, as a tokenizer of transformers: files of OpenRLHF call it."""
        ids = self.encode(text)
        if return_tensors is None:
            return {"input_ids": ids}
        import torch

        return {"input_ids": torch.tensor([ids])}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text; each of the two special strings becomes one id."""
        ids: list[int] = []
        for piece in _SPLIT.split(text) if "<|im_" in text else (text,):
            if piece in _SPECIALS:
                ids.append(_SPECIALS[piece])
                continue
            try:
                encoded = piece.encode(_UTF_32)
            except UnicodeEncodeError:  # a lone surrogate, or a pair of them for one character
                encoded = piece.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode(_UTF_32)
            ids += array(_CODE, encoded).tolist()
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        """Return the text of ids."""
        ids = [i for i in token_ids if i < _FIRST_SPECIAL] if skip_special_tokens else token_ids
        return array(_CODE, ids).tobytes().decode(_UTF_32, _HANDLER)

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False, tools: Any = None,
        **_: Any,
    ) -> str:  # fmt: skip
        """Render messages and tools; see `chatml`."""
        return chatml(conversation, tools, add_generation_prompt=add_generation_prompt)


def chatml(conversation: Sequence[Mapping[str, Any]], tools: Any = None, *, add_generation_prompt: bool) -> str:
    """Return messages as ChatML, the template of all tokenizers without a model.

    Tools go into a system message before the others.
    """
    text = f"{OPEN}system\n{tools_text(tools)}{CLOSE}\n" if tools else ""
    for message in conversation:
        content = text_of(message)
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            written = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
            content += f"{chr(10) if content else ''}<tool_call>\n{written}\n</tool_call>"
        text += f"{OPEN}{message['role']}\n{content}{CLOSE}\n"
    return text + (f"{OPEN}assistant\n" if add_generation_prompt else "")


def _special(error: UnicodeError) -> tuple[str, int]:
    """Return the text of a special token for four bytes that are not a character."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    end = error.start + 4
    return _NAMES.get(int.from_bytes(error.object[error.start : end], sys.byteorder), "\ufffd"), end


codecs.register_error(_HANDLER, _special)  # so that C code decodes a whole text
