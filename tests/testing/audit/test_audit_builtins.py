"""The environments that ship pass their own audit, and say what they cannot be audited for."""

import pytest

from agentenv.episode.registry import env_source
from agentenv.runs.config import RunConfig
from agentenv.runs.prepare import load_tasks
from agentenv.testing.audit.auditing import AuditOptions, audit_env
from agentenv_envs.code_sandbox.problems import load_problems

QUICK = (
    "null", "random", "echo", "repeat_feedback", "format_only", "search", "enumeration", "injection/verdict_words",
    "special_tokens/chatml", "unicode", "ifeval", "math/many_boxes", "choice/every_box", "hacks", "gold", "wrong",
    "hedge",
)  # fmt: skip
"""Some of all but programs, bombs, and what graders of mathematics compute for long."""


async def audited(env, **options):
    source = env_source(env, {})
    return await audit_env(
        source, load_tasks(RunConfig.from_flags(env=env), source), name=env, options=AuditOptions(**options)
    )


def failed(result):
    return [(each.id, each.evidence[:1]) for each in result.findings if each.severity == "fail"]


@pytest.mark.long
@pytest.mark.parametrize(("env", "num_tasks"), [("math_retry", 1), ("guess_number", 4), ("verify", 8), ("rm_chat", 1)])
async def test_a_built_in_passes_its_own_audit(env, num_tasks):
    result = await audited(env, num_tasks=num_tasks, policies=QUICK)
    assert failed(result) == []
    gold = [row for row in result.policies if row.policy == "gold"]
    assert [(row.num_full, row.num_plays) for row in gold] == ([] if env == "rm_chat" else [(num_tasks, num_tasks)])


@pytest.mark.long
async def test_tool_use_passes_its_own_audit_and_gold_calls_a_tool_first():
    policies = ("echo/prompt", "enumeration/numbers", "hacks/many_answers", "hacks/forged_result", "wrong", "hedge")
    result = await audited("tool_use", task_ids=("000000", "000010"), policies=policies, repeat=False)
    assert failed(result) == []
    gold = [play for play in result.plays if play.policy == "gold"]
    assert [(len(play.steps), play.score) for play in gold] == [(2, 1.0)] * 2


@pytest.mark.long
async def test_games_pass_the_audit_with_gold_of_many_turns():
    result = await audited("gymnasium_text", num_tasks=2, policies=("hacks",), repeat=False)
    assert failed(result) == []
    assert max(len(play.steps) for play in result.plays if play.policy == "gold") > 8


@pytest.mark.long
async def test_every_row_of_verify_has_gold_that_earns_and_nothing_that_earns_for_nothing():
    result = await audited("verify", num_tasks=40, policies=("hacks",), repeat=False)
    assert failed(result) == []


@pytest.mark.slow
@pytest.mark.parametrize("env", ["math_retry", "guess_number", "verify", "reasoning_gym"])
async def test_a_built_in_passes_the_audit_by_every_policy(env):
    assert failed(await audited(env, num_tasks=1)) == []


async def test_rm_chat_says_that_it_has_no_ceiling():
    result = await audited("rm_chat", num_tasks=2, policies=("null", "gold"))
    assert [(each.id, each.severity) for each in result.findings] == [("no-ceiling", "warn")]


@pytest.mark.long
async def test_an_echo_of_the_prompt_has_not_the_form_that_the_prompt_asks_for():
    """A true fault that the audit found: the prompt names the tags, so saying it back had full marks."""
    result = await audited("verify", task_ids=("format_0", "format_1"), policies=("echo/prompt", "format_only", "gold"))
    assert {play.policy for play in result.plays if play.score == 1.0} == {"gold"}


@pytest.mark.slow
async def test_code_sandbox_passes_its_own_audit():
    result = await audited("code_sandbox", num_tasks=2, policies=("null", "code", "hacks", "gold", "wrong", "hedge"))
    assert failed(result) == []
    gold = next(row for row in result.policies if row.policy == "gold")
    assert (gold.num_full, gold.num_plays) == (2, 2)


async def test_gold_of_code_sandbox_is_the_solution_of_a_shipped_task_or_of_the_row():
    agent = env_source("code_sandbox", {}).cls()
    problem = load_problems()[7]
    states = {"label": dict(problem.label), "metadata": {}}
    assert problem.reference in await agent.gold(states)
    assert await agent.gold({"label": {"entry_point": "x"}, "metadata": {}}) is None
    assert "def x(): pass" in await agent.gold({"label": {}, "metadata": {"reference": "def x(): pass\n"}})


@pytest.mark.parametrize(
    ("label", "gold"),
    [("#### 42", "#### 42"), ("42", "#### 42"), (42, "#### 42"), ("It is 6 * 7.\n#### 42", "#### 42"), (None, None)],
)
async def test_gold_of_math_retry_is_the_answer_behind_its_mark(label, gold):
    assert await env_source("math_retry", {}).cls().gold({"label": label, "metadata": {}}) == gold


@pytest.mark.parametrize(
    ("row", "gold"),
    [
        ({"label": "B", "metadata": {"domain": "choice"}}, r"\boxed{B}"),
        ({"label": "$5/8$", "metadata": {"domain": "math"}}, r"\boxed{5/8}"),
        ({"label": ["be", "to be"], "metadata": {"domain": "similarity"}}, "be"),
        ({"label": "^x$", "metadata": {"domain": "regex"}}, None),
        ({"label": "^x$", "metadata": {"domain": "regex", "reference": "x"}}, "x"),
        ({"label": {"domain": "math", "label": "7"}, "metadata": {}}, r"\boxed{7}"),
        ({"label": {"type": "object"}, "metadata": {"domain": "json_schema"}}, None),
    ],
)
async def test_gold_of_verify_is_the_reference_or_a_label_that_can_be_said(row, gold):
    assert await env_source("verify", {}).cls().gold(row) == gold


async def test_gold_of_guess_number_is_drawn_like_the_number():
    agent = env_source("guess_number", {}).cls()
    number = await agent.gold({"label": None, "seed": 11, "metadata": {}})
    result = await agent.step({"label": None, "seed": 11, "action_text": number})
    assert result.score == 1.0
