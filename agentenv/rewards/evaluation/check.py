"""Checks of a reward model for common traps, before a policy is trained on its scores.

Most reward models that score nonsense do so silently: a second BOS, a pad token that is also the EOS, a missing
template, an activation added by a server. Each check returns findings: a warning is a trap for other code that this
library avoids, a problem makes scores wrong.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from agentenv.errors import AgentEnvError, ConfigError, DataError
from agentenv.rewards.models.types import RewardScorer

if TYPE_CHECKING:
    from agentenv.rewards.models.render import ConversationRenderer

TOLERANCE = 1e-4
"""Largest change of a score with its batch, in float32; relative for scores above 1."""
_SHOWN_TOKENS = 8
_HEADS = ("score", "classifier")
_KNOWN_CLASSES = ("ForSequenceClassification", "ForRewardModel")
"""Names of heads, and ends of the names of classes, that vLLM knows."""
_QUESTIONS = ("What is 12 + 30?", "Name a color.", "Is it safe to look into the sun?", "Write a line about rain.")
_ANSWERS = (
    "42.", "It is 41, I think", "Blue, which is the color of a clear sky at noon, and of much of the sea below it.",
    "No. Looking into the sun harms your eyes within seconds; use a projection or a proper filter instead.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """The result of one check."""

    name: str
    state: Literal["ok", "warning", "problem"]
    detail: str


def conversations() -> list[list[dict[str, str]]]:
    """Return each answer to each question; their lengths differ, so that batches need padding."""
    return [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question in _QUESTIONS
        for answer in _ANSWERS
    ]


async def check(scorer: RewardScorer, *, exact: bool = True) -> list[CheckFinding]:
    """Return all findings on a reward model. Its tokens are checked if transformers runs it in this process.

    Args:
        scorer: the reward model; the caller closes it.
        exact: True if it computes in float32, so that a score that changes with its batch is a problem.

    Raises:
        ConfigError: the model cannot be loaded.
    """
    findings: list[CheckFinding] = []
    loaded: Any = await scorer.load() if hasattr(scorer, "load") else None
    if hasattr(loaded, "renderer"):
        renderer, classifier = loaded.renderer, loaded.classifier
        findings += token_findings(renderer)
        findings += [pad_finding(renderer, classifier.config), length_finding(renderer, classifier.max_positions)]
        findings.append(head_finding(classifier.config))
    return findings + await score_findings(scorer, exact=exact)


# --- tokens -----------------------------------------------------------------------------------------------------------


def token_findings(renderer: ConversationRenderer) -> list[CheckFinding]:
    """Return findings on the template, the last tokens with the pooled one, and the BOS."""
    if not renderer.has_template:
        return [CheckFinding("template", "problem", "the tokenizer has none: only text can be scored, not messages")]
    try:
        ids = renderer.ids(conversations()[0]).token_ids
    except DataError as error:
        return [CheckFinding("template", "problem", str(error))]
    tokens = [_token(renderer.tokenizer, token_id) for token_id in ids[-_SHOWN_TOKENS:]]
    findings = [
        CheckFinding("template", "ok", f"renders a conversation of two messages in {len(ids)} tokens"),
        CheckFinding("last tokens", "ok", " ".join(tokens)),
    ]
    pooled = f"{tokens[-1]} (id {ids[-1]}), the last one"
    if ids[-1] != renderer.ids(conversations()[1]).token_ids[-1]:  # its answer ends differently
        pooled += "; it belongs to the answer: no token ends the turn"
        findings.append(CheckFinding("pooled token", "warning", pooled))
    else:
        findings.append(CheckFinding("pooled token", "ok", pooled))
    return [*findings, bos_finding(renderer, ids)]


def bos_finding(renderer: ConversationRenderer, ids: Sequence[int]) -> CheckFinding:
    """Return the finding on the number of leading BOS tokens, also if the rendered text is tokenized again."""
    tokenizer: Any = renderer.tokenizer
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        return CheckFinding("BOS", "ok", "the tokenizer has none")
    count = _leading(ids, bos)
    if count > 1:
        return CheckFinding("BOS", "problem", f"{count} at the beginning: omit add_bos, or fix the template")
    naive = _leading(tokenizer(tokenizer.decode(list(ids)))["input_ids"], bos)
    if naive > 1:
        return CheckFinding(
            "BOS", "warning", f"{count} at the beginning; tokenizing the rendered text again makes it {naive}"
        )
    if count < naive:
        return CheckFinding(
            "BOS", "warning", "none at the beginning, although the tokenizer adds one to texts: try add_bos"
        )
    return CheckFinding("BOS", "ok", f"{count} at the beginning")


def _leading(ids: Sequence[int], bos: int) -> int:
    return next((place for place, token_id in enumerate(ids) if token_id != bos), len(ids))


def pad_finding(renderer: ConversationRenderer, config: Any) -> CheckFinding:
    """Return the finding on the pad token: transformers pools the last token that is not the pad token."""
    pad = config.get_text_config().pad_token_id
    if pad is None:
        return CheckFinding("pad token", "warning", "the config has none: transformers' own pooling refuses batches")
    try:
        ids = renderer.ids(conversations()[0]).token_ids
    except DataError:  # reported by the check of the template
        ids = []
    name = f"{_token(renderer.tokenizer, pad)} (id {pad})"
    if ids and ids[-1] == pad:
        detail = f"{name} is also the last token: transformers' own pooling scores conversations without their end"
        return CheckFinding("pad token", "warning", f"{detail}; here the position comes from the length")
    if pad == getattr(renderer.tokenizer, "eos_token_id", None):
        return CheckFinding("pad token", "warning", f"{name} occurs in conversations (it is the EOS): pool by length")
    if pad in ids:
        return CheckFinding("pad token", "warning", f"{name} occurs in conversations: pool by length")
    return CheckFinding("pad token", "ok", name)


def length_finding(renderer: ConversationRenderer, positions: int | None) -> CheckFinding:
    """Return the finding on the length limit and the treatment of longer conversations."""
    most, overflow = renderer.max_length, renderer.overflow
    detail = f"{most} tokens of {positions or 'an unknown number of'} positions; longer: {overflow}"
    return CheckFinding("max length", "ok" if positions is None or most <= positions else "problem", detail)


def head_finding(read: Any) -> CheckFinding:
    """Return the finding on the head: vLLM's server draws a random one if the config contradicts the checkpoint.

    `read` is the config of the model that was loaded, with the labels that the checkpoint has.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    name = "head in vLLM"
    try:
        config = AutoConfig.from_pretrained(read.name_or_path)
    except (OSError, ValueError) as error:
        return CheckFinding(name, "warning", f"vLLM: expected the folder or Hugging Face id of a model, got {error}")
    prefix = getattr(config, "value_head_prefix", "score")
    if prefix not in _HEADS:
        detail = (
            f"vLLM: expected a checkpoint whose head is named `score` or `classifier`, got one named {prefix!r} by "
            f"value_head_prefix in the config of {read.name_or_path!r}: vLLM would draw a random one. Save it so, or "
            "use HFScorer, which reads OpenRLHF's."
        )
        return CheckFinding(name, "warning", detail)
    overrides: dict[str, Any] = {}
    if len(config.id2label) != read.num_labels:  # OpenRLHF's: one label, unsaid, and transformers takes two
        overrides["num_labels"] = read.num_labels
    own_class = not any(each.endswith(_KNOWN_CLASSES) for each in config.architectures or ())  # such as OpenRLHF's
    if own_class and config.model_type in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        overrides["architectures"] = [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[config.model_type]]
    if overrides:
        return CheckFinding(name, "warning", f"vllm serve needs --hf-overrides '{json.dumps(overrides)}'")
    labels = ", ".join(str(label) for _, label in sorted(read.id2label.items()))
    return CheckFinding(name, "ok", f"its labels are {labels}")


def _token(tokenizer: Any, token_id: int) -> str:
    return repr(tokenizer.decode([token_id]))


# --- scores -----------------------------------------------------------------------------------------------------------


async def score_findings(scorer: RewardScorer, *, exact: bool) -> list[CheckFinding]:
    """Return findings on the scores: their range, ties, activation, and dependence on the batch."""
    findings: list[CheckFinding] = []
    try:
        alone = [(await scorer.score(conversation)).value for conversation in conversations()]
        by_question = [alone[start : start + len(_ANSWERS)] for start in range(0, len(alone), len(_ANSWERS))]
        if sum(len(set(values)) < len(values) for values in by_question) * 2 > len(by_question):
            same = f"different answers to a question have the same score, such as {by_question[0]}"
            findings.append(CheckFinding("scores", "problem", f"{same}: check the pooled token"))
        else:
            shown = f"{len(alone)} conversations, from {min(alone):.4g} to {max(alone):.4g}"
            findings.append(CheckFinding("scores", "ok", shown))
        findings.append(activation_finding(alone))
        together = await asyncio.gather(*map(scorer.score, conversations()))
    except ConfigError:
        raise
    except AgentEnvError as error:
        return [*findings, CheckFinding("scores", "problem", str(error))]
    return [*findings, batch_finding(alone, [each.value for each in together], exact=exact)]


def activation_finding(values: Sequence[float]) -> CheckFinding:
    """Return the finding on activations: a sigmoid or softmax puts all scores between 0 and 1."""
    if all(0.0 < value < 1.0 for value in values):
        detail = "all scores are between 0 and 1: an activation may be applied; margins vanish where it saturates"
        return CheckFinding("activation", "warning", detail)
    return CheckFinding("activation", "ok", "scores are not all between 0 and 1")


def batch_finding(alone: Sequence[float], together: Sequence[float], *, exact: bool) -> CheckFinding:
    """Return the finding on how much scores change with their batch."""
    diffs = [abs(a - b) for a, b in zip(alone, together, strict=True)]
    detail = f"{len(alone)} conversations scored alone and all at once differ by at most {max(diffs):.2g}"
    if all(diff <= TOLERANCE * max(1.0, abs(a)) for diff, a in zip(diffs, alone, strict=True)):
        return CheckFinding("batch invariance", "ok", detail)
    return CheckFinding("batch invariance", "problem" if exact else "warning", f"{detail}: more than {TOLERANCE:g}")
