"""The kinds of findings, each with a stable id and why it matters; and the findings that are allowed."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from agentenv._util.plurals import counted
from agentenv.testing.audit.episodes import Play, shorten

Severity = Literal["fail", "warn", "note"]
SEVERITIES: tuple[Severity, ...] = ("fail", "warn", "note")
MAX_EVIDENCE = 8
"""Maximum number of plays in a finding."""

WHY: Mapping[str, str] = {
    "null-earns": "An empty action gets the full score, so a policy learns to output nothing. Where nothing is to be "
    "changed, demand a spoken answer or a look-up.",
    "null-pays": "An empty action earns half of the score or of gold's reward or more, which rewards doing nothing.",
    "prefix-earns": "The beginning of the answer gets the full score, so a policy learns incomplete answers.",
    "hack-earns": "An action that solves nothing gets the full score, so training finds and reinforces it.",
    "guess-earns": "An action that ignores the task or copies it gets the full score. On few tasks that is chance; "
    "on many, the guess is what is learned. Have more possible answers, or reward more than the answer: where nothing "
    "is to be changed, a look-up or a spoken answer.",
    "trivial-tasks": "Almost any text gets the full score on these tasks, so they teach nothing. Drop or fix the rows.",
    "reward-exceeds-gold": "A policy earns more than gold, by actions that solve nothing or that are paid again, so "
    "training prefers it. Pay each step once, or what it changes with its sign, so that undoing it costs as much.",
    "reward-contradicts-score": "Rewards and scores disagree: training raises what the reports call failed.",
    "score-disagrees": "The right action after a wrong one earns a reward, and the episode has the score of a failure, "
    "so reports do not count what training rewards. Return the score of the state after the action.",
    "partial-credit": "A policy that solves nothing earns a large part of gold's reward or of the score. Pay "
    "for the result only, and nothing for an end.",
    "calls-ungraded": "Other values in gold's calls, or no calls of a tool, earn as much, and replies do not say "
    "the answer. Grade the state that they leave, unless the tools are only a help.",
    "hedging": "An action with a right and a wrong answer gets the full score in either order, so listing many pays.",
    "gold-fails": "The environment's gold action does not get the full score: the label, the grader or gold is wrong, "
    "or `max_turns` of the class is too low.",
    "gold-stops": "Gold has said all, and the episode continues: the environment ends it too late, or gold is "
    "incomplete.",
    "length-refused": "A right answer earns nothing when much text stands before it, as reasoning does: a cut of the "
    "text, or a pattern that needs the beginning. Say in the prompt how long an answer may be, or read all of it.",
    "gold-partly": "Gold is known only for some tasks; the others may be unsolvable.",
    "no-ceiling": "Without gold, a score or --pass_reward, the full score is unknown and the audit checks "
    "only errors, leaks, flakiness and rewards for any action. Implement `gold`, return a score in [0, 1], or pass "
    "--pass_reward.",
    "reward-constant": "Actions that solve nothing earn as much as any other, so there is nothing to learn.",
    "silence-pays": "An empty action earns more than most wrong ones, so a policy learns to output nothing.",
    "length-pays": "The reward grows with the length of an action, so a policy learns to write more.",
    "repeat-pays": "Actions earn a reward again and again, so a policy learns to repeat them. Reward each once, or "
    "reward only the result.",
    "no-gold": "The environment has no gold, so its tasks may be unsolvable. Implement `gold`. Where the label earns "
    "nothing either, look at types: the label 42 equals no text.",
    "no-signal": "Gold earns no more than an empty action, so there is nothing to learn.",
    "answer-in-feedback": "Feedback on a wrong action contains the answer, so a policy learns to wait for it. "
    "What a tool looks up may be the answer: that is noted only.",
    "answer-in-prompt": "The prompt contains the answer, behind the same word on most tasks or in a solved example. "
    "Allow this if the task is to find or copy it.",
    "flaky-reward": "The same actions on the same task and seed earned a different reward the second time. Look for "
    "random numbers without the episode's seed, for clocks, and for state that episodes share.",
    "flaky-observation": "The same actions on the same task and seed got a different observation the second time.",
    "hostile-error": "An action made the environment raise; a policy that samples it loses its whole group.",
    "data-error": "The environment cannot run this row.",
    "infra-error": "An external service failed, so the rewards of these actions are unknown. If it refused what an "
    "action asked for (such as HTTP 404), raise no InfraError: tell the policy.",
    "step-timeout": "An action made a step exceed its timeout.",
    "score-missing": "Some episodes that the environment ended have a score and others have none, so a pass rate "
    "counts only a part of them. Return a score at each end, 0.0 for a failed task.",
    "score-range": "A score is outside [0, 1], and `score_range` of the class declares no scale to filter by.",
    "reward-range": "A reward is outside --reward_range.",
    "limit-passed": "A limit can be passed: it counts actions, and one action may have any number of calls, or it is "
    "compared with `==`, and a cost jumps over it. Count each call, and compare with `<=`.",
    "slow-steps": "Actions of this policy make steps much slower than others, which delays training.",
    "slow-call": "Some calls take long, or block the event loop and so all episodes. Await in async code, fail fast "
    "on unknown arguments, or raise --time_limit_s.",
    "runs-code": "The environment runs text of a policy as Python in its own process, where it can do everything that "
    "the process can. Parse it (json, ast.literal_eval), or run it with agentenv.sandbox.",
    "tool-fails": "A tool answers every call with an error, so no policy can use it.",
    "tool-hangs": "A call has no result within the tool's limit, and its episode waits for it. Check the arguments.",
    "observation-grows": "Observations grow with each turn, while the conversation keeps the earlier ones: an episode "
    "costs tokens by the square of its turns. Say only what is new.",
    "reply-size": "A number in a call sets the size of the reply, so one call can fill the context. Cap it, and say "
    "that the reply is cut.",
    "state-grows": "The state of an episode grows faster than its conversation, so long episodes exhaust the memory.",
    "clock": "The same actions earn or show something else at another time of day or after longer, so runs cannot be "
    "repeated and the speed of the engine decides. Take time from the task, or count turns.",
    "forged-tokens": "Text of a policy came back as special tokens, so a policy can forge turns of other roles.",
}  # fmt: skip
"""Why each kind of finding matters, by kind."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One play that shows a finding."""

    policy: str
    task_id: str
    action: str
    reward: float | None
    score: float | None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One defect of an environment, or a fact worth knowing."""

    id: str
    """Stable id: the kind, and the policy if there is one, as in `hack-earns:enumeration`."""
    severity: Severity
    summary: str
    evidence: tuple[Evidence, ...] = ()
    num_plays: int = 0
    """Number of plays that show it; `evidence` has the first of them."""
    reproduce: str = ""
    """A command that reproduces it."""
    allowed: str = ""
    """Why it is allowed; empty if it is not."""

    @property
    def kind(self) -> str:
        """The id without the policy."""
        return self.id.partition(":")[0]

    @property
    def why(self) -> str:
        """Why this kind of finding matters."""
        return WHY[self.kind]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, and `why`."""
        return {**asdict(self), "why": self.why}


def make_finding(
    kind: str,
    severity: Severity,
    summary: str,
    plays: Sequence[Play] = (),
    *,
    policy: str = "",
    detail: str | Callable[[Play], str] = "",
) -> AuditFinding:
    """Return a finding with plays as evidence, spread over tasks; `detail` describes all of them, or each.

    A play that is given more than once, such as for each of its steps, counts once.
    """
    plays = list({id(play): play for play in plays}.values())
    describe = detail if callable(detail) else lambda play: detail or error_text(play)
    seen: dict[str, int] = {}
    ranked = []
    for play in plays:
        seen[play.task_id] = seen.get(play.task_id, 0) + 1
        ranked.append((seen[play.task_id], play))
    first = [play for _, play in sorted(ranked, key=lambda pair: pair[0])][:MAX_EVIDENCE]
    evidence = tuple(Evidence(p.key, p.task_id, shorten(p.action), p.reward, p.score, describe(p)) for p in first)
    return AuditFinding(f"{kind}:{policy}" if policy else kind, severity, summary, evidence, len(plays))


def findings_of(kind: str, severity: Severity, summary: str, plays: Sequence[Play], **more: Any) -> list[AuditFinding]:
    """Return the finding that these plays show, as `make_finding` does; none without plays."""
    return [make_finding(kind, severity, summary, plays, **more)] if plays else []


def error_text(play: Play) -> str:
    """Return the error of a play in one line; empty if there is none."""
    error = play.error
    return "" if error is None else shorten(f"{error.where}: {error.type}: {error.message} {error.place}".strip())


def tasks_of(plays: Sequence[Play]) -> str:
    """Return the number of tasks of some plays, in words."""
    return counted(len({play.task_id for play in plays}), "task")


def apply_allowances(
    findings: Sequence[AuditFinding], allowed: Mapping[str, str]
) -> tuple[list[AuditFinding], list[str]]:
    """Return the findings with the reasons of allowed ones, and the patterns that match nothing.

    Args:
        findings: all of them.
        allowed: reason by id; an id may have wildcards, and a kind stands for all of its policies.
    """
    used: set[str] = set()
    marked = []
    for each in findings:
        pattern = next((one for one in allowed if one == each.kind or fnmatch.fnmatchcase(each.id, one)), None)
        if pattern is not None:
            used.add(pattern)
        marked.append(each if pattern is None else replace(each, allowed=allowed[pattern]))
    return marked, [pattern for pattern in allowed if pattern not in used]
