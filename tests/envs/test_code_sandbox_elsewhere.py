"""code_sandbox with its programs on a server: the same grades as with a sandbox here."""

import asyncio

import pytest

from agentenv.errors import ConfigError
from agentenv.rewards.rules.code.reward import shared_sandbox
from agentenv.sandbox import LocalSandbox, SandboxUnavailable
from agentenv.sandbox.fusion.server import FusionServer
from agentenv_envs.code_sandbox import CodeSandbox
from agentenv_envs.code_sandbox.problems import answer, load_problems


async def graded(url, problem, code):
    """The score of one attempt, and where it ran."""
    instance = CodeSandbox(max_attempts=1, sandbox={"backend": "sandbox_fusion", "endpoints": [url]})
    states = {"observation": [{"role": "user", "content": problem.prompt}], "label": problem.label}
    await instance.reset(dict(states))
    result = await instance.step({**states, "observation_text": problem.prompt, "action_text": answer(code)})
    return result.score, result.info["isolation"]


@pytest.mark.long
async def test_references_pass_and_mutants_fail_on_a_server():
    problems = {problem.label["mode"]: problem for problem in load_problems()}.values()  # one of each mode
    programs = [(problem, code) for problem in problems for code in (problem.reference, problem.mutants[0])]
    try:
        async with LocalSandbox() as local, FusionServer(local) as server:
            grades = await asyncio.gather(*(graded(server.url, *each) for each in programs))
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    assert {isolation for _, isolation in grades} == {"remote"}
    assert [score == 1.0 for score, _ in grades] == [True, False] * len(problems)


async def test_an_unknown_backend_is_an_error_of_the_environments_options():
    with pytest.raises(ConfigError, match=r"sandbox: expected one of local, .* Did you mean 'sandbox_fusion'"):
        await shared_sandbox({"backend": "sandbox_fusoin"})
