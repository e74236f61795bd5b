"""The tool `python`: what a model gets for its code, and what stays between its calls."""

import asyncio

import pytest
import pytest_asyncio

from agentenv.errors import InfraError
from agentenv.sandbox import ExecLimits
from agentenv.sandbox.local.session import InterpreterSession
from agentenv.tools.python import PythonTool

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def tool(local):
    async with PythonTool(local, limits=ExecLimits(cpu_s=1, wall_s=60, memory_mb=128), max_chars=400) as tool:
        yield tool


async def test_code_without_output_is_reported(tool):
    assert await tool.python("x = 1") == "[No output.]"


async def test_an_exception_is_its_traceback_without_our_frames_and_the_variables_stay(tool):
    text = await tool.python("y = 5\n1 / 0")
    assert text.endswith("ZeroDivisionError: division by zero")
    assert "1 / 0" in text
    assert "_session_driver" not in text
    assert await tool.python("y") == "5"


@pytest.mark.parametrize("code", ["def f(:", "x = 'open", "  x = 1\n y = 2"])
async def test_a_syntax_error_is_shown_without_the_parsers_frames(tool, code):
    text = await tool.python(code)
    assert text.startswith('  File "turn-')
    assert "ast.py" not in text
    assert "Traceback" not in text


async def test_frames_of_libraries_that_the_code_calls_stay(tool):
    text = await tool.python("import ast\ndef g():\n    return ast.parse('f(:')\ng()")
    assert text.startswith('Traceback (most recent call last):\n  File "turn-')
    assert "ast.py" in text
    assert "main.py" not in text


async def test_the_kernels_count_of_cpu_that_runs_ahead_ends_no_code_before_its_limit(tool):
    code = "import signal as s\ns.getsignal(s.SIGPROF)(s.SIGPROF, None)\n7"
    assert await tool.python(code) == "7"


@pytest.mark.long
async def test_code_that_does_not_end_is_ended_with_its_limit_and_the_next_call_works(tool):
    text = await tool.python("def f():\n    while True: pass\nf()")
    assert "[The code was ended: it used 1 s of CPU.]" in text
    assert "in f\n" in text
    assert "main.py" not in text
    assert "_stop" not in text
    assert await tool.python("2 + 2") == "4"


async def test_an_interpreter_that_the_code_ends_is_replaced_and_both_answers_say_what_is_gone(tool):
    await tool.python("z = 1")
    assert "variables and files are gone" in await tool.python("import os; os._exit(3)")
    text = await tool.python("z")
    assert text.startswith("[A new interpreter")
    assert "NameError" in text


async def test_calls_at_the_same_time_run_one_after_the_other(tool):
    await tool.python("n = []")
    await asyncio.gather(*(tool.python(f"n.append({i}); len(n)") for i in range(4)))
    assert await tool.python("sorted(n)") == "[0, 1, 2, 3]"


@pytest.mark.long
async def test_a_call_that_is_given_up_leaves_a_tool_that_works(tool):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await tool.python("import time; time.sleep(10)")
    assert "7" in await tool.python("3 + 4")


class NoSandbox:
    """A sandbox whose interpreters do not start."""

    limits = ExecLimits()

    def session(self, **options):
        return InterpreterSession(self, limits=self.limits, idle_s=1, max_s=1)

    async def start(self, *args, **options):
        raise InfraError("sandbox: expected a program to start, got none. Try again")


async def test_a_sandbox_that_fails_is_not_an_answer_to_the_model():
    with pytest.raises(InfraError, match="expected a program to start"):
        await PythonTool(NoSandbox()).python("1")
