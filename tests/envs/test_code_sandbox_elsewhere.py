"""code_sandbox with its programs on a server: the same grades as with a sandbox here."""

import asyncio

import pytest

from agentenv.errors import ConfigError
from agentenv.rewards.rules.code.shared import shared_sandbox
from agentenv.sandbox import LocalSandbox, SandboxUnavailable
from agentenv.sandbox.fusion.server import FusionServer
from agentenv_envs.code_sandbox import CodeSandbox
from agentenv_envs.code_sandbox.problems import answer, load_problems

PROBLEMS = load_problems()


async def graded(url, problem, code):
    """The score of one attempt, and where it ran."""
    instance = CodeSandbox(max_attempts=1, sandbox={"backend": "sandbox_fusion", "endpoints": [url]})
    states = {"observation": [{"role": "user", "content": problem.prompt}], "label": problem.label}
    await instance.reset(dict(states))
    result = await instance.step({**states, "observation_text": problem.prompt, "action_text": answer(code)})
    return result.score, result.info["isolation"]


async def all_graded(problems, num_mutants):
    try:
        async with LocalSandbox() as local, FusionServer(local) as server:
            programs = [
                (problem, code) for problem in problems for code in (problem.reference, *problem.mutants[:num_mutants])
            ]
            return programs, await asyncio.gather(*(graded(server.url, *each) for each in programs))
    except SandboxUnavailable as error:
        pytest.skip(str(error))


def check(programs, grades):
    assert {isolation for _, isolation in grades} == {"remote"}
    wrong = [
        (problem.id, code)
        for (problem, code), (score, _) in zip(programs, grades, strict=True)
        if (score == 1.0) != (code == problem.reference)
    ]
    assert wrong == []


@pytest.mark.long
async def test_programs_are_graded_on_a_server():
    of_each_mode = {problem.label["mode"]: problem for problem in PROBLEMS}
    check(*await all_graded(of_each_mode.values(), num_mutants=1))


@pytest.mark.slow
async def test_references_pass_and_mutants_fail_on_a_server():
    check(*await all_graded(PROBLEMS[::2], num_mutants=1))


async def test_an_unknown_backend_is_an_error_of_the_environments_options():
    with pytest.raises(ConfigError, match=r"sandbox: expected one of local, .* Did you mean 'sandbox_fusion'"):
        await shared_sandbox({"backend": "sandbox_fusoin"})
