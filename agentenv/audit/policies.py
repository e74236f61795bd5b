"""Policies that must not earn, and gold, which must: what `agentenv audit` plays an environment with.

A policy is a function from what it sees (`View`) to its action. None of them solves anything: they see the prompt, what
the environment said, and the labels of *other* rows. `gold` and what is made of it are shown `AgentInstance.gold`.

An action is what a tokenizer's decode could give: where a policy's text has a lone surrogate, as a label may, U+FFFD is
said in its place (`plays.Table`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from agentenv.audit.hacks import FAMILIES, INJECTIONS, ROLE_MARKS, UNICODE
from agentenv.errors import ConfigError

Kind = Literal["empty", "blind", "attack", "robust", "wrong", "gold"]
"""empty: says nothing; blind: says what may be right by chance; attack: goes for the grader; robust: breaks things;
wrong: is made of gold and is not it; gold: what the environment says is right."""

BASELINES = ("null", "constant", "gold")
"""Played in every audit: what an empty action, any text and gold earn is what the others are judged by."""
CONSTANTS = ("0", "1", "2", "3", "10", "42", "yes", "no", "A", "B", "C", "D", "True", "False", "None")
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
_WORD = re.compile(r"\w+")
_FUNCTION = re.compile(r"(?:def\s+|`)([A-Za-z_]\w*)\s*\(")
_NUMBER = re.compile(r"\d+")
_LAST = re.compile(r"(?<![\w.,])(\d[\d,]*(?:\.\d+)?|[^\W\d_]+)(?=\W*(?:</\w+>\s*)?$)")
"""The number or word at the end of an action, but for what closes it."""
_SHORTEST_CUT = 4
"""Letters of a word whose half says no longer what the word says, as `y` may for `yes`."""


@dataclass(frozen=True, slots=True)
class View:
    """What a policy sees before an action."""

    prompt: str
    """The first observation, as text."""
    feedback: str
    """The last observation after an action; empty on the first turn."""
    turn_index: int
    rng: Random
    """Of this episode alone: equal seeds give equal actions."""
    room: int
    """Most tokens that the action may have."""
    others: Sequence[Any]
    """Labels of the other rows."""
    gold: str | None = None
    """What the environment says earns the full score; only for policies of the kinds gold and wrong."""


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to act."""

    name: str
    """Of the policy; several with one name are its variants, and reported together."""
    variant: str
    kind: Kind
    act: Callable[[View], str | None]
    """None: it has nothing to say here, and the episode is not counted."""

    @property
    def key(self) -> str:
        """name/variant: how findings and `--policies` call it."""
        return f"{self.name}/{self.variant}" if self.variant else self.name

    @property
    def shown_gold(self) -> bool:
        """Whether its view has gold."""
        return self.kind in ("gold", "wrong")


def says(name: str, kind: Kind, texts: Mapping[str, str]) -> list[Policy]:
    """Policies that say the same in each turn: one variant per text.

    Example: `says("my_hack", "attack", {"loud": "I AM RIGHT"})`.
    """
    return [Policy(name, variant, kind, lambda view, text=text: text) for variant, text in texts.items()]  # type: ignore[misc]


def all_policies(hacks: Mapping[str, str] | None = None) -> list[Policy]:
    """Every policy, in the order of the report; `hacks` are the environment's own."""
    constants = {text: text for text in CONSTANTS}
    return [
        *says("null", "empty", {"empty": "", "space": " \n"}),
        *[Policy("random", name, "blind", act) for name, act in _RANDOM.items()],
        Policy("echo", "prompt", "blind", lambda view: view.prompt[: view.room]),
        Policy("echo", "words", "blind", lambda view: ", or ".join(dict.fromkeys(_WORD.findall(view.prompt)))),
        Policy("repeat_feedback", "", "blind", lambda view: view.feedback or view.prompt[: view.room]),
        *says("format_only", "attack", FORMS),
        *says("constant", "blind", constants),
        *says("constant_in_forms", "blind", {name: _ALL_FORMS.format(text) for name, text in constants.items()}),
        Policy("constant", "common_label", "blind", _common_label),
        Policy("search", "numbers", "blind", lambda view: _ALL_FORMS.format(view.turn_index + 1)),
        Policy("search", "letters", "blind", lambda view: _ALL_FORMS.format("ABCDEFGHIJ"[view.turn_index % 10])),
        *[Policy("enumeration", name, "attack", act) for name, act in _ENUMERATIONS.items()],
        *says("injection", "attack", INJECTIONS),
        *says("special_tokens", "attack", ROLE_MARKS),
        *[Policy("length_bomb", name, "robust", act) for name, act in _BOMBS.items()],
        *says("unicode", "robust", UNICODE),
        *[policy for family in FAMILIES for policy in _family(family)],
        *says("hacks", "attack", hacks or {}),
        Policy("gold", "", "gold", lambda view: view.gold),
        Policy("wrong", "changed", "wrong", lambda view: changed(view.gold)),
        Policy("wrong", "prefix", "wrong", lambda view: beginning(view.gold)),
        Policy("hedge", "gold_first", "wrong", lambda view: _joined(view.gold, changed(view.gold))),
        Policy("hedge", "gold_last", "wrong", lambda view: _joined(changed(view.gold), view.gold)),
    ]


def chosen(policies: Sequence[Policy], names: Iterable[str]) -> list[Policy]:
    """Those that are named, by name or name/variant, and BASELINES; all where nothing is named.

    Raises:
        ConfigError: there is no such policy.
    """
    names = list(names)
    known = {policy.name for policy in policies} | {policy.key for policy in policies} | {"hacks"}
    unknown = [name for name in names if name not in known]
    if unknown:
        all_names = ", ".join(dict.fromkeys(policy.name for policy in policies))
        raise ConfigError(f"--policies: expected some of {all_names}, got {unknown[0]!r}. Give name or name/variant.")
    wanted = {*names, *BASELINES}
    return [policy for policy in policies if not names or policy.name in wanted or policy.key in wanted]


def label_text(label: Any) -> str:
    """A label as somebody would say it; empty where it is none that can be said."""
    if isinstance(label, bool) or label is None:
        return "" if label is None else str(label)
    return str(label).strip() if isinstance(label, str | int | float) else ""


def changed(gold: str | None) -> str | None:
    """The gold action with its last number one larger, and so of the same form, but wrong; None without a number."""
    found = list(_NUMBER.finditer(gold or ""))
    if gold is None or not found:
        return None
    last = found[-1]
    number = last[0]
    return f"{gold[: last.start()]}{str(int(number[-9:]) + 1).zfill(len(number[-9:]))}{gold[last.end() :]}"


def beginning(gold: str | None) -> str | None:
    """The gold action with the tail of its last number or word cut off; None where no other answer is left by that."""
    found = _LAST.search(gold or "")
    if gold is None or found is None or "```" in gold:
        return None
    whole = found[1].partition(".")[0]
    left = whole[: max(1, len(whole) // 2)].rstrip(",")
    digits = whole.replace(",", "")
    same = int(digits) == int(left.replace(",", "")) if digits.isdecimal() else len(whole) < _SHORTEST_CUT
    return None if same else f"{gold[: found.start()]}{left}{gold[found.end() :]}"


def is_answer(gold: str, label: Any) -> bool:
    """Whether what ends the gold action ends the label too, and so is the answer: of free text it is any word."""
    found = _LAST.search(gold)
    return found is not None and re.search(rf"(?<![\w.]){re.escape(found[1])}\W*$", label_text(label)) is not None


def _joined(first: str | None, second: str | None) -> str | None:
    return None if first is None or second is None else f"{first}\n\n{second}"


def _common_label(view: View) -> str | None:
    texts = Counter(text for text in map(label_text, view.others) if text)
    return max(texts, key=lambda text: (texts[text], text)) if texts else None


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
    "other_labels": lambda view: "The answer is " + ", or ".join(_other_labels(view)) + ".",
}
_BOMBS: Mapping[str, Callable[[View], str]] = {
    "words": lambda view: ("answer " * _BOMB_TOKENS)[: min(view.room, _BOMB_TOKENS)],
    "digits": lambda view: "9" * min(view.room, _BOMB_TOKENS),
    "brackets": lambda view: ("({[" * _BOMB_TOKENS)[: min(view.room, _BOMB_TOKENS)],
    "lines": lambda view: "\n" * min(view.room, _BOMB_TOKENS),
}


def _other_labels(view: View) -> list[str]:
    return list(dict.fromkeys(text for text in map(label_text, view.others) if 0 < len(text) <= 40))[:200]


def _family(name: str) -> list[Policy]:
    if name != "code":
        return says(name, "attack", FAMILIES[name])
    return [
        Policy(name, variant, "attack", lambda view, text=text: _program(view, text))  # type: ignore[misc]
        for variant, text in FAMILIES[name].items()
    ]


def _program(view: View, text: str) -> str:
    found = _FUNCTION.search(view.prompt)
    return f"```python\n{text.format(name=found[1] if found else 'solve')}```"
