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
from itertools import combinations
from random import Random
from typing import Any, Literal

from agentenv.errors import ConfigError
from agentenv.testing.audit.explore import answering_policies, blind_calls, odd_policies, writing_policies
from agentenv.testing.audit.hacks import FAMILIES, INJECTIONS, ROLE_MARKS, UNICODE
from agentenv.testing.audit.view import View
from agentenv.testing.marked_code import marked, marked_actions, marked_calls
from agentenv.testing.odd_values import ODD_FLOATS, ODD_FORMS, odd_forms
from agentenv.testing.tool_calls import calls_of_choices, calls_with_texts, ending_tools, right_calls, wrong_calls
from agentenv.testing.world import ALL_FORMS, form_of

Kind = Literal["empty", "blind", "attack", "robust", "wrong", "gold"]
"""empty: an empty action; blind: right only by chance; attack: aimed at the grader; robust: text that breaks parsers;
wrong: derived from gold, but wrong; gold: the right answer of the environment."""

BASELINES = ("null", "constant", "gold")
"""Run in every audit: the others are judged relative to an empty action, arbitrary text and gold."""
CONSTANTS = ("0", "1", "2", "3", "10", "42", "yes", "no", "A", "B", "C", "D", "True", "False", "None")
LONG_NAMES = ("explore", "odd_calls", "overwrite", "call", "again")
LONG_POLICIES = ("calls/each_tool", "calls/each_choice")
"""Have as many turns as a run, so that rewards of repeated calls add up as they would in training."""
HEAVY = ("math/tower", "math/factorial")
"""Policies whose actions take graders to their time limit, whatever the task is: they are played on few tasks."""
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
_BOMB_TOKENS = 20_000
_WRONG_CALLS = tuple(wrong_calls([{"name": "any"}]))
_WORD = re.compile(r"\w+")
_NAME = re.compile(r"(?<=[\"'`])[^\"'`\n]{1,40}(?=[\"'`])|[A-Z]\w+")
_VALUES = tuple(map(re.compile, (r'(?<=: ")[^"]*(?=")', r"\d+", r"[^\W\d_]+")))
_FUNCTION = re.compile(r"(?:def\s+|`)([A-Za-z_]\w*)\s*\(")
_NUMBER = re.compile(r"\d+")
_LAST = re.compile(r"(?<![\w.,])(\d[\d,]*(?:\.\d+)?|[^\W\d_]+)(?=\W*(?:</\w+>\s*)?$)")
"""The number or word at the end of an action, before closing marks."""
_QUOTED = re.compile(r"(?<!\w)[\"'`\u201c\u2018]([^\"'`\n\u201c\u201d\u2018\u2019]{1,60})[\"'`\u201d\u2019](?!\w)")
_NUM_QUOTED = 4
_GIVING_UP = ("I give up.", "give up", "quit", "exit", "stop", "done", "skip", "pass", "resign")
PART = "part_"
"""Start of the variants that repeat parts of gold, which are known only after gold was played."""
FOLLOWED = ("say", "call", "again")
"""Policies of `follow.py`, whose variants are their actions. say: the action in each turn; call: the action, and an
end; again: the action until the last turn, and an end."""
_NUM_PARTS, _MAX_WORDS = 6, 12
"""Number of single gold actions, and of pairs, that are repeated on a task; most different actions to draw pairs of."""
_SHORTEST_CUT = 4
"""Minimum length of a word whose half is a different answer; `y` may stand for `yes`."""


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
        *[AuditPolicy("echo", f"quoted_{n + 1}", "blind", partial(_quoted, n)) for n in range(_NUM_QUOTED)],
        AuditPolicy("repeat_feedback", "", "blind", lambda view: view.feedback or view.prompt[: view.room]),
        *text_policies("format_only", "attack", FORMS),
        *text_policies("constant", "blind", constants),
        *text_policies(
            "constant_in_forms", "blind", {name: ALL_FORMS.format(text) for name, text in constants.items()}
        ),
        AuditPolicy("constant", "common_label", "blind", _common_label),
        AuditPolicy("search", "numbers", "blind", lambda view: ALL_FORMS.format(view.turn_index + 1)),
        AuditPolicy("search", "letters", "blind", lambda view: ALL_FORMS.format("ABCDEFGHIJ"[view.turn_index % 10])),
        *[AuditPolicy("enumeration", name, "attack", act) for name, act in _ENUMERATIONS.items()],
        *text_policies("giving_up", "attack", {text: text for text in _GIVING_UP}),
        *text_policies("odd_numbers", "attack", {text: text for text in ODD_FLOATS}),
        *text_policies("odd_numbers", "attack", {f"{text}_in_forms": ALL_FORMS.format(text) for text in ODD_FLOATS}),
        *text_policies("injection", "attack", INJECTIONS),
        *text_policies("special_tokens", "attack", ROLE_MARKS),
        *[AuditPolicy("length_bomb", name, "robust", act) for name, act in _BOMBS.items()],
        *text_policies("unicode", "robust", UNICODE),
        *[policy for family in FAMILIES for policy in _family(family)],
        # A right call may be the answer, by chance.
        AuditPolicy("calls", "each_tool", "blind", lambda view: _in_turn(right_calls(view.tools), view)),
        AuditPolicy("calls", "each_choice", "blind", lambda view: _in_turn(calls_of_choices(view.tools), view)),
        AuditPolicy("calls", "of_prompt", "blind", _call_of_prompt),
        *[AuditPolicy("calls", name, "blind", partial(_wrong_call, name)) for name in _WRONG_CALLS],
        *[AuditPolicy("explore", name, "blind", act) for name, act in blind_calls().items()],
        *[AuditPolicy("odd_calls", name, "attack", act) for name, act in odd_policies().items()],
        *[AuditPolicy("overwrite", name, "attack", act) for name, act in writing_policies().items()],
        *[AuditPolicy("answers", name, "attack", act) for name, act in answering_policies().items()],
        *text_policies("code_to_run", "attack", marked_actions()),
        AuditPolicy("code_to_run", "in_calls", "attack", lambda view: _in_turn(marked_calls(view.tools), view)),
        *text_policies("hacks", "attack", hacks or {}),
        AuditPolicy("gold", "", "gold", lambda view: view.gold),
        AuditPolicy("wrong", "changed", "wrong", lambda view: change_answer(view.gold)),
        AuditPolicy("wrong", "prefix", "wrong", lambda view: cut_answer(view.gold)),
        AuditPolicy("label", "alone", "wrong", lambda view: label_text(view.label) or None),
        AuditPolicy("label", "in_forms", "wrong", _label_in_forms),
        *[AuditPolicy("odd_values", name, "wrong", partial(_odd_form, name)) for name in ODD_FORMS],
        AuditPolicy("odd_values", "code", "wrong", lambda view: _with_last_value(view.gold, marked("in_gold"))),
        *[AuditPolicy("farm", f"turn_{turn + 1}", "wrong", partial(_farm, turn)) for turn in range(_FARMED_TURNS)],
        AuditPolicy("hedge", "gold_first", "wrong", lambda view: _joined(view.gold, change_answer(view.gold))),
        AuditPolicy("hedge", "gold_last", "wrong", lambda view: _joined(change_answer(view.gold), view.gold)),
        AuditPolicy("hedge", "others_last", "wrong", lambda view: _joined(view.gold, _others_like(view))),
        AuditPolicy("hedge", "others_first", "wrong", lambda view: _joined(_others_like(view), view.gold)),
    ]


def select_policies(policies: Sequence[AuditPolicy], names: Iterable[str]) -> list[AuditPolicy]:
    """Return the policies with these names (name or name/variant) and BASELINES; without names, all.

    Raises:
        ConfigError: a name is unknown.
    """
    names = list(names)
    known = {policy.name for policy in policies} | {policy.key for policy in policies} | {"hacks"}
    known |= {f"farm/{PART}{number + 1}" for number in range(2 * _NUM_PARTS)}
    unknown = [name for name in names if name not in known and name.partition("/")[0] not in FOLLOWED]
    if unknown:
        all_names = ", ".join(dict.fromkeys(policy.name for policy in policies))
        raise ConfigError(f"--policies: expected some of {all_names}, got {unknown[0]!r}. Use name or name/variant.")
    wanted = {*names, *BASELINES}
    selected = [policy for policy in policies if not names or policy.name in wanted or policy.key in wanted]
    if any(map(ends_a_process, selected)):  # the harmless code shows whether they may be played
        selected += [policy for policy in policies if policy.name == "code_to_run" and policy not in selected]
    return selected


def ends_a_process(policy: AuditPolicy) -> bool:
    """Return True if the actions are programs that would end the process in which they run."""
    return policy.name == "code" or policy.key == "math/python_inside"


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


def _others_like(view: View) -> str | None:
    """Return the labels of other rows, each in the form of gold; None if gold does not hold the label of its row."""
    own = label_text(view.label)
    if view.gold is None or len(own) < _SHORTEST_CUT or own not in view.gold or own.isdecimal():
        return None
    others = [text for text in map(label_text, view.others) if text and text != own and len(text) <= 60]
    return "\n\n".join(view.gold.replace(own, text) for text in dict.fromkeys(others[:8])) or None


def _label_in_forms(view: View) -> str | None:
    text, form = label_text(view.label), form_of(view.prompt)
    if not text:
        return None
    calls = calls_with_texts(ending_tools(view.tools), lambda tool: text)
    return next(iter(calls.values()), form.format(text) if form else ALL_FORMS.format(text))


def _other_labels(view: View) -> str:
    labels = dict.fromkeys(text for text in map(label_text, view.others) if 0 < len(text) <= 40)
    return f"The answer is {', or '.join(list(labels)[:200])}."


def _in_turn(calls: Mapping[str, str], view: View) -> str | None:
    return list(calls.values())[view.turn_index % len(calls)] if calls else None


def gold_parts(golds: Mapping[str, Sequence[str]], rng: Random) -> dict[str, list[AuditPolicy]]:
    """Return policies that repeat one or two gold actions, by task; none where every task takes one action.

    Args:
        golds: the gold actions of each task.
        rng: draws the pairs, also of actions of other tasks if there are few different ones.
    """
    if max(map(len, golds.values()), default=0) < 2:
        return {}
    words = list(dict.fromkeys(action for actions in golds.values() for action in actions))
    found = {}
    for task_id, actions in golds.items():
        own = list(dict.fromkeys(actions))
        parts: list[tuple[str, ...]] = [(action,) for action in rng.sample(own, min(len(own), _NUM_PARTS))]
        pairs: list[tuple[str, ...]] = list(combinations(words if len(words) <= _MAX_WORDS else own[:_MAX_WORDS], 2))
        parts += rng.sample(pairs, min(len(pairs), _NUM_PARTS))
        found[task_id] = [
            AuditPolicy("farm", f"{PART}{n}", "wrong", lambda view, part=part: part[view.turn_index % len(part)])  # type: ignore[misc]
            for n, part in enumerate(parts, 1)
        ]
    return found


def _quoted(index: int, view: View) -> str | None:
    texts = list(dict.fromkeys(_QUOTED.findall(view.prompt)))
    return texts[index] if index < len(texts) else None


def _call_of_prompt(view: View) -> str | None:
    """Return a call of the next tool with words and numbers of the prompt."""
    words = [*_NAME.findall(view.prompt), *_WORD.findall(view.prompt)] or ["word"]
    return _in_turn(calls_with_texts(view.tools, lambda tool: view.rng.choice(words)), view)


def _with_last_value(gold: str | None, value: str) -> str | None:
    """Return gold with another value in place of its last text in JSON, or else of its last number or word."""
    found = next((list(pattern.finditer(gold or "")) for pattern in _VALUES if pattern.search(gold or "")), [])
    return None if gold is None or not found else f"{gold[: found[-1].start()]}{value}{gold[found[-1].end() :]}"


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
    return ALL_FORMS.format(view.rng.choice(numbers))


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
