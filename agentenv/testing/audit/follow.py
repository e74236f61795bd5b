"""Follows up what the first plays showed: commands that prompts name, calls that earned, and actions that were paid."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence

from agentenv.testing.audit.explore import ending, is_time_to_end
from agentenv.testing.audit.judging import EPS, Facts
from agentenv.testing.audit.policies import FOLLOWED, AuditPolicy
from agentenv.testing.audit.view import View
from agentenv.testing.tool_calls import call_text
from agentenv.testing.world import commands_of

_NUM_COMMANDS, _NUM_CALLS, _NUM_PAID = 10, 6, 6
_MAX_CHARS = 400
_CALL = re.compile(r"<tool_call>\n.*?\n</tool_call>", re.DOTALL)
_HALF = 0.5


def followed(name: str, action: str) -> AuditPolicy:
    """Return a policy with a fixed action, whose variant is the action itself: a call as its JSON."""
    variant = action.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>") if _CALL.fullmatch(action) else action

    def act(view: View) -> str:
        if name == "say" or (not view.before if name == "call" else not is_time_to_end(view)):
            return action
        return ending(view)

    return AuditPolicy(name, variant, "blind", act)


def named_policies(names: Sequence[str]) -> list[AuditPolicy]:
    """Return the policies of such keys, which hold their action."""
    found = []
    for key in names:
        name, _, variant = key.partition("/")
        if name in FOLLOWED and variant:
            try:
                call = json.loads(variant)
            except ValueError:
                call = None
            is_call = isinstance(call, dict) and call.keys() == {"name", "arguments"}
            found.append(followed(name, call_text(call["name"], call["arguments"]) if is_call else variant))
    return found


def follow_up(facts: Facts) -> list[AuditPolicy]:
    """Return policies with the commands of prompts, the calls of plays that earned, and the actions that were paid."""
    prompts = {play.task_id: play.prompt for play in facts.plays}
    commands = Counter(command for prompt in prompts.values() for command in commands_of(prompt))
    found = [followed("say", each) for each, _ in commands.most_common(_NUM_COMMANDS)]
    earned, paid = Counter[str](), Counter[str]()
    for play in facts.plays:
        if facts.kinds[play.key] in ("gold", "wrong") or play.reward is None:
            continue
        if play.policy == "explore" and (facts.full(play) or facts.score_share(play.score) >= _HALF):
            earned.update({call for step in play.steps for call in _CALL.findall(step.action)})
        paid.update({step.action for step in play.steps if step.reward > EPS and len(step.action) <= _MAX_CHARS})
    found += [followed("call", each) for each, _ in earned.most_common(_NUM_CALLS)]
    return found + [followed("again", each) for each, _ in paid.most_common(_NUM_PAID)]
