"""The traps of one reward model, before anything is trained on its scores.

Most reward models that score nonsense do so silently: a second BOS, a pad token that is the EOS too, a template that is
missing, an activation that a server put on top. Each check says what it found; a warning is a trap for others that is
none here, a problem one that makes scores wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from agentenv.errors import AgentEnvError, ConfigError, DataError
from agentenv.rewards.models.types import Conversation, Scored, Scorer

if TYPE_CHECKING:
    from agentenv.rewards.models.render import Renderer

TOLERANCE = 1e-4
"""By how much a score may change with its batch, in float32; larger scores by as much per unit."""
_SHOWN_TOKENS = 8
_QUESTIONS = ("What is 12 + 30?", "Name a colour.", "Is it safe to look into the sun?", "Write a line about rain.")
_ANSWERS = (
    "42.", "It is 41, I think", "Blue, which is the colour of a clear sky at noon, and of much of the sea below it.",
    "No. Looking into the sun harms your eyes within seconds; use a projection or a proper filter instead.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    name: str
    state: Literal["ok", "warning", "problem"]
    detail: str

    def to_dict(self) -> dict[str, str]:
        """As JSON has it."""
        return asdict(self)


def conversations() -> list[list[dict[str, str]]]:
    """What is scored: every answer to every question, from a word to a few lines, so that batches need padding."""
    return [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question in _QUESTIONS
        for answer in _ANSWERS
    ]


async def check(scorer: Scorer, *, exact: bool = True) -> list[Finding]:
    """All findings on a reward model; those on its tokens where it is of transformers, in this process.

    Args:
        scorer: the reward model, which the caller closes.
        exact: whether it computes in float32, so that a score that changes with its batch is a problem.

    Raises:
        ConfigError: it cannot be opened.
    """
    findings: list[Finding] = []
    load = getattr(scorer, "load", None)
    loaded = None if load is None else await load()
    renderer: Any = getattr(loaded, "renderer", None)
    if renderer is not None:
        findings += token_findings(renderer)
        classifier = getattr(loaded, "classifier", None)
        if classifier is not None:
            findings += [pad_finding(renderer, classifier.config), length_finding(renderer, classifier.max_positions)]
    return findings + await score_findings(scorer, exact=exact)


# --- tokens -----------------------------------------------------------------------------------------------------------


def token_findings(renderer: Renderer) -> list[Finding]:
    """On the template, the last tokens with the one that is pooled, and the BOS."""
    if not renderer.has_template:
        return [Finding("template", "problem", "the tokenizer has none: only text can be scored, no messages")]
    try:
        ids = renderer.ids(conversations()[0]).token_ids
    except DataError as error:
        return [Finding("template", "problem", str(error))]
    tokens = [_token(renderer.tokenizer, token_id) for token_id in ids[-_SHOWN_TOKENS:]]
    findings = [
        Finding("template", "ok", f"renders a conversation of two messages in {len(ids)} tokens"),
        Finding("last tokens", "ok", " ".join(tokens)),
    ]
    at_end = len(_end(renderer))
    pooled = f"{tokens[-1]} (id {ids[-1]}), the last one"
    if not at_end:
        findings.append(Finding("pooled token", "warning", f"{pooled}; it is of the answer: nothing ends the turn"))
    else:
        findings.append(Finding("pooled token", "ok", pooled))
    return [*findings, _bos_finding(renderer, ids)]


def _end(renderer: Renderer) -> list[int]:
    """The tokens that two conversations, whose answers end differently, have at their end in common."""
    first, second = (renderer.ids(conversation).token_ids[::-1] for conversation in conversations()[:2])
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    return first[:same][::-1]


def _bos_finding(renderer: Renderer, ids: Sequence[int]) -> Finding:
    """How many BOS a conversation begins with, and how many it would have where the rendering is tokenized again."""
    tokenizer: Any = renderer.tokenizer
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        return Finding("BOS", "ok", "the tokenizer has none")
    count = _leading(ids, bos)
    if count > 1:
        return Finding("BOS", "problem", f"{count} at the beginning: leave out add_bos, or mend the template")
    naive = _leading(tokenizer(tokenizer.decode(list(ids)))["input_ids"], bos)
    if naive > 1:
        return Finding(
            "BOS", "warning", f"{count} at the beginning; tokenizing the rendered text again makes it {naive}"
        )
    if count < naive:
        return Finding("BOS", "warning", "none at the beginning, but the tokenizer puts one before texts: try add_bos")
    return Finding("BOS", "ok", f"{count} at the beginning")


def _leading(ids: Sequence[int], bos: int) -> int:
    count = 0
    while count < len(ids) and ids[count] == bos:
        count += 1
    return count


def pad_finding(renderer: Renderer, config: Any) -> Finding:
    """Whether pooling the last token that is not the pad, as transformers does, finds the last token."""
    pad = config.get_text_config().pad_token_id
    if pad is None:
        return Finding("pad token", "warning", "the config has none: transformers' own pooling refuses batches")
    try:
        ids = renderer.ids(conversations()[0]).token_ids
    except DataError:  # told by the check of the template
        ids = []
    name = f"{_token(renderer.tokenizer, pad)} (id {pad})"
    if ids and ids[-1] == pad:
        detail = f"{name} is also the last token: transformers' own pooling scores conversations without their end"
        return Finding("pad token", "warning", f"{detail}; here the position comes from the length")
    if pad == getattr(renderer.tokenizer, "eos_token_id", None):
        return Finding("pad token", "warning", f"{name} is in conversations too (it is the EOS): pool by length")
    if pad in ids:
        return Finding("pad token", "warning", f"{name} is in conversations too: pool by length")
    return Finding("pad token", "ok", name)


def length_finding(renderer: Renderer, positions: int | None) -> Finding:
    """The longest conversation, and what becomes of longer ones."""
    most, overflow = renderer.max_length, renderer.overflow
    said = f"{most} tokens of {positions or 'unknown many'} positions; longer: {overflow}"
    return Finding("max length", "ok" if positions is None or most <= positions else "problem", said)


def _token(tokenizer: Any, token_id: int) -> str:
    return repr(tokenizer.decode([token_id]))


# --- scores -----------------------------------------------------------------------------------------------------------


async def score_findings(scorer: Scorer, *, exact: bool) -> list[Finding]:
    """On the numbers: whether there are any, differ, look as if an activation made them, and depend on their batch."""
    asked = conversations()
    alone: list[float] = []
    for conversation in asked:
        said = await _scored(scorer, conversation)
        if isinstance(said, Finding):
            return [said]
        alone.append(said.value)
    findings = [Finding("scores", "ok", f"{len(alone)} conversations, from {min(alone):.4g} to {max(alone):.4g}")]
    by_question = [alone[start : start + len(_ANSWERS)] for start in range(0, len(alone), len(_ANSWERS))]
    if sum(len(set(values)) < len(values) for values in by_question) * 2 > len(by_question):
        detail = f"different answers to a question have the same score, such as {by_question[0]}: what is pooled?"
        findings = [Finding("scores", "problem", detail)]
    findings.append(activation_finding(alone))
    together = await asyncio.gather(*(_scored(scorer, conversation) for conversation in asked))
    failed = [each for each in together if isinstance(each, Finding)]
    if failed:
        return [*findings, failed[0]]
    return [*findings, batch_finding(alone, [each.value for each in together if isinstance(each, Scored)], exact=exact)]


async def _scored(scorer: Scorer, conversation: Conversation) -> Scored | Finding:
    try:
        return await scorer.score(conversation)
    except ConfigError:
        raise
    except AgentEnvError as error:
        return Finding("scores", "problem", str(error))


def activation_finding(values: Sequence[float]) -> Finding:
    """Whether all numbers are between 0 and 1, as those are that a sigmoid or softmax made."""
    if all(0.0 < value < 1.0 for value in values):
        detail = "all scores are between 0 and 1: an activation may be on; margins shrink to nothing where it saturates"
        return Finding("activation", "warning", detail)
    return Finding("activation", "ok", "scores are not all between 0 and 1")


def batch_finding(alone: Sequence[float], together: Sequence[float], *, exact: bool) -> Finding:
    """By how much scores change with their batch."""
    diffs = [abs(a - b) for a, b in zip(alone, together, strict=True)]
    said = f"{len(alone)} conversations alone and all at once differ by at most {max(diffs):.2g}"
    if all(diff <= TOLERANCE * max(1.0, abs(a)) for diff, a in zip(diffs, alone, strict=True)):
        return Finding("batch invariance", "ok", said)
    return Finding("batch invariance", "problem" if exact else "warning", f"{said}: more than {TOLERANCE:g}")
