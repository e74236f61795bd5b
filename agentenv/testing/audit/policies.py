"""The policies of `agentenv audit`: those that must not earn, and gold, which must.

A policy is a function from a `View` to an action. No policy except gold solves anything: they see the prompt, the
feedback, and the labels of *other* rows. `gold` and its variants also see `AgentInstance.gold`.

`episodes.PolicyRunner` replaces lone surrogates in an action by U+FFFD, as the decode of a tokenizer does.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Literal

from agentenv.errors import ConfigError
from agentenv.testing.audit.hacks import FAMILIES, INJECTIONS, ROLE_MARKS, UNICODE
from agentenv.testing.odd_values import ODD_FORMS, odd_forms
from agentenv.testing.tool_calls import calls_of_choices, right_calls, wrong_calls

Kind = Literal["empty", "blind", "attack", "robust", "wrong", "gold"]
"""empty: an empty action; blind: right only by chance; attack: aimed at the grader; robust: text that breaks parsers;
wrong: derived from gold, but wrong; gold: the right answer of the environment."""

BASELINES = ("null", "constant", "gold")
"""Run in every audit: the others are judged relative to an empty action, arbitrary text and gold."""
CONSTANTS = ("0", "1", "2", "3", "10", "42", "yes", "no", "A", "B", "C", "D", "True", "False", "None")
LONG_POLICIES = ("calls/each_tool", "calls/each_choice")
"""Have as many turns as a run, so that rewards of repeated calls add up as they would in training."""
_FARMED_TURNS = 3
"""Number of the first gold actions that are repeated, each by a policy."""
FORMS: Mapping[str, str] = {
    "box": "\\boxed{}",
    "answer_tags": "<answer></answer>",
    "think_and_answer": "<think></think>\n<answer></answer>",
    "hashes": "####",
    "code_fence": "```python\n```",
    "json_fence": "```json\n{}\n```",
    "tool_call": "<tool_call>\n{}\n</tool_call>",
    "the_answer_is": "The answer is",
    "bullet": "* \n* ",
}
_ALL_FORMS = "The answer is {0}.\n\\boxed{{{0}}}\n<answer>{0}</answer>\n#### {0}"
_BOMB_TOKENS = 20_000
_WRONG_CALLS = tuple(wrong_calls([{"name": "any"}]))
_WORD = re.compile(r"\w+")
_FUNCTION = re.compile(r"(?:def\s+|`)([A-Za-z_]\w*)\s*\(")
_NUMBER = re.compile(r"\d+")
_LAST = re.compile(r"(?<![\w.,])(\d[\d,]*(?:\.\d+)?|[^\W\d_]+)(?=\W*(?:</\w+>\s*)?$)")
"""The number or word at the end of an action, before closing marks."""
_SHORTEST_CUT = 4
"""Minimum length of a word whose half is a different answer; `y` may stand for `yes`."""


@dataclass(frozen=True, slots=True)
class View:
    """The input of a policy before an action."""

    prompt: str
    """The first observation, as text."""
    feedback: str
    """The last observation after an action; empty on the first turn."""
    turn_index: int
    rng: Random
    """Random generator of this episode; equal seeds produce equal actions."""
    room: int
    """Maximum number of tokens of the action."""
    others: Sequence[Any]
    """Labels of the other rows."""
    gold: str | None = None
    """The environment's gold action; only for policies of the kinds gold and wrong."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The tools that the environment offers."""
    before: Sequence[str] = ()
    """The actions so far."""


@dataclass(frozen=True, slots=True)
class AuditPolicy:
    """A policy of an audit."""

    name: str
    """Name of the policy; policies with the same name are variants and reported together."""
    variant: str
    kind: Kind
    act: Callable[[View], str | None]
    """Function that returns the action; None: the policy does not apply, and the episode is not counted."""

    @property
    def key(self) -> str:
        """The name/variant that findings and `--policies` use."""
        return f"{self.name}/{self.variant}" if self.variant else self.name

    @property
    def sees_gold(self) -> bool:
        """Whether its view contains gold."""
        return self.kind in ("gold", "wrong")


def text_policies(name: str, kind: Kind, texts: Mapping[str, str]) -> list[AuditPolicy]:
    """Return policies that repeat a text in each turn: one variant per text.

    Example: `text_policies("my_hack", "attack", {"loud": "I AM RIGHT"})`.
    """
    return [AuditPolicy(name, variant, kind, lambda view, text=text: text) for variant, text in texts.items()]  # type: ignore[misc]


def all_policies(hacks: Mapping[str, str] | None = None) -> list[AuditPolicy]:
    """Return every policy in the order of the report; `hacks` are those of the environment."""
    constants = {text: text for text in CONSTANTS}
    return [
        *text_policies("null", "empty", {"empty": "", "space": " \n"}),
        *[AuditPolicy("random", name, "blind", act) for name, act in _RANDOM.items()],
        AuditPolicy("echo", "prompt", "blind", lambda view: view.prompt[: view.room]),
        AuditPolicy("echo", "words", "blind", lambda view: ", or ".join(dict.fromkeys(_WORD.findall(view.prompt)))),
        AuditPolicy("repeat_feedback", "", "blind", lambda view: view.feedback or view.prompt[: view.room]),
        *text_policies("format_only", "attack", FORMS),
        *text_policies("constant", "blind", constants),
        *text_policies(
            "constant_in_forms", "blind", {name: _ALL_FORMS.format(text) for name, text in constants.items()}
        ),
        AuditPolicy("constant", "common_label", "blind", _common_label),
        AuditPolicy("search", "numbers", "blind", lambda view: _ALL_FORMS.format(view.turn_index + 1)),
        AuditPolicy("search", "letters", "blind", lambda view: _ALL_FORMS.format("ABCDEFGHIJ"[view.turn_index % 10])),
        *[AuditPolicy("enumeration", name, "attack", act) for name, act in _ENUMERATIONS.items()],
        *text_policies("injection", "attack", INJECTIONS),
        *text_policies("special_tokens", "attack", ROLE_MARKS),
        *[AuditPolicy("length_bomb", name, "robust", act) for name, act in _BOMBS.items()],
        *text_policies("unicode", "robust", UNICODE),
        *[policy for family in FAMILIES for policy in _family(family)],
        # A right call may be the answer, by chance.
        AuditPolicy("calls", "each_tool", "blind", lambda view: _in_turn(right_calls(view.tools), view)),
        AuditPolicy("calls", "each_choice", "blind", lambda view: _in_turn(calls_of_choices(view.tools), view)),
        *[AuditPolicy("calls", name, "blind", partial(_wrong_call, name)) for name in _WRONG_CALLS],
        *text_policies("hacks", "attack", hacks or {}),
        AuditPolicy("gold", "", "gold", lambda view: view.gold),
        AuditPolicy("wrong", "changed", "wrong", lambda view: change_answer(view.gold)),
        AuditPolicy("wrong", "prefix", "wrong", lambda view: cut_answer(view.gold)),
        *[AuditPolicy("odd_values", name, "wrong", partial(_odd_form, name)) for name in ODD_FORMS],
        *[AuditPolicy("farm", f"turn_{turn + 1}", "wrong", partial(_farm, turn)) for turn in range(_FARMED_TURNS)],
        AuditPolicy("hedge", "gold_first", "wrong", lambda view: _joined(view.gold, change_answer(view.gold))),
        AuditPolicy("hedge", "gold_last", "wrong", lambda view: _joined(change_answer(view.gold), view.gold)),
    ]


def select_policies(policies: Sequence[AuditPolicy], names: Iterable[str]) -> list[AuditPolicy]:
    """Return the policies with these names (name or name/variant) and BASELINES; without names, all.

    Raises:
        ConfigError: a name is unknown.
    """
    names = list(names)
    known = {policy.name for policy in policies} | {policy.key for policy in policies} | {"hacks"}
    unknown = [name for name in names if name not in known]
    if unknown:
        all_names = ", ".join(dict.fromkeys(policy.name for policy in policies))
        raise ConfigError(f"--policies: expected some of {all_names}, got {unknown[0]!r}. Use name or name/variant.")
    wanted = {*names, *BASELINES}
    return [policy for policy in policies if not names or policy.name in wanted or policy.key in wanted]


def label_text(label: Any) -> str:
    """Return a label as text; empty if it is not a text, number or bool."""
    if isinstance(label, bool) or label is None:
        return "" if label is None else str(label)
    return str(label).strip() if isinstance(label, str | int | float) else ""


def change_answer(gold: str | None) -> str | None:
    """Return the gold action with its last number increased by one: the same form, but wrong; None without a number."""
    found = list(_NUMBER.finditer(gold or ""))
    if gold is None or not found:
        return None
    last = found[-1]
    number = last[0]
    return f"{gold[: last.start()]}{str(int(number[-9:]) + 1).zfill(len(number[-9:]))}{gold[last.end() :]}"


def cut_answer(gold: str | None) -> str | None:
    """Return the gold action with its last number or word cut in half; None if the result is not a different answer."""
    found = _LAST.search(gold or "")
    if gold is None or found is None or "```" in gold:
        return None
    whole = found[1].partition(".")[0]
    left = whole[: max(1, len(whole) // 2)].rstrip(",")
    digits = whole.replace(",", "")
    same = int(digits) == int(left.replace(",", "")) if digits.isdecimal() else len(whole) < _SHORTEST_CUT
    return None if same else f"{gold[: found.start()]}{left}{gold[found.end() :]}"


def is_answer(gold: str, label: Any) -> bool:
    """Return True if the end of the gold action is also the end of the label, and so the answer."""
    found = _LAST.search(gold)
    return found is not None and re.search(rf"(?<![\w.]){re.escape(found[1])}\W*$", label_text(label)) is not None


def _odd_form(name: str, view: View) -> str | None:
    """Return gold with odd values; unchanged on a turn without such values, except for the first of a plain text."""
    if view.gold is None:
        return None
    return odd_forms(view.gold).get(name, view.gold if view.turn_index or view.tools else None)


def _joined(first: str | None, second: str | None) -> str | None:
    return None if first is None or second is None else f"{first}\n\n{second}"


def _common_label(view: View) -> str | None:
    texts = Counter(text for text in map(label_text, view.others) if text)
    return max(texts, key=lambda text: (texts[text], text)) if texts else None


def _other_labels(view: View) -> str:
    labels = dict.fromkeys(text for text in map(label_text, view.others) if 0 < len(text) <= 40)
    return f"The answer is {', or '.join(list(labels)[:200])}."


def _in_turn(calls: Mapping[str, str], view: View) -> str | None:
    return list(calls.values())[view.turn_index % len(calls)] if calls else None


def _farm(turn: int, view: View) -> str | None:
    """Return gold up to a turn, and then the action of that turn again and again."""
    return view.before[turn] if len(view.before) > turn else view.gold


def _wrong_call(name: str, view: View) -> str | None:
    return wrong_calls(view.tools).get(name)


def _random_words(view: View) -> str:
    words = _WORD.findall(view.prompt) or ["word"]
    return " ".join(view.rng.choice(words) for _ in range(12))


def _random_number(view: View) -> str:
    numbers = _NUMBER.findall(view.prompt) or [str(number) for number in range(100)]
    return _ALL_FORMS.format(view.rng.choice(numbers))


_RANDOM: Mapping[str, Callable[[View], str]] = {
    "letters": lambda view: "".join(view.rng.choice("abcdefghijklmnopqrstuvwxyz     ") for _ in range(60)),
    "words_of_the_prompt": _random_words,
    "number_of_the_prompt": _random_number,
}
_ENUMERATIONS: Mapping[str, Callable[[View], str]] = {
    "numbers": lambda view: "The answer is " + " ".join(map(str, range(0, 1000))) + ".",
    "numbers_down": lambda view: "The answer is " + " ".join(map(str, range(999, -1, -1))) + ".",
    "words": lambda view: "The answer is yes, no, true, false, A, B, C, D, E, none, all, left, right, up, down.",
    "answer_tags": lambda view: "".join(f"<answer>{number}</answer>" for number in range(0, 200)),
    "other_labels": _other_labels,
}
_BOMBS: Mapping[str, Callable[[View], str]] = {
    "words": lambda view: ("answer " * _BOMB_TOKENS)[: min(view.room, _BOMB_TOKENS)],
    "digits": lambda view: "9" * min(view.room, _BOMB_TOKENS),
    "brackets": lambda view: ("({[" * _BOMB_TOKENS)[: min(view.room, _BOMB_TOKENS)],
    "lines": lambda view: "\n" * min(view.room, _BOMB_TOKENS),
}


def _family(name: str) -> list[AuditPolicy]:
    if name != "code":
        return text_policies(name, "attack", FAMILIES[name])
    return [
        AuditPolicy(name, variant, "attack", lambda view, text=text: _program(view, text))  # type: ignore[misc]
        for variant, text in FAMILIES[name].items()
    ]


def _program(view: View, text: str) -> str:
    found = _FUNCTION.search(view.prompt)
    return f"```python\n{text.format(name=found[1] if found else 'solve')}```"
