"""The pytest plugin in the suite of somebody else's project, with public names alone."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

import agentenv.testing
import agentenv_envs
from agentenv import AgentInstance, Limits, StepResult, Task
from agentenv.testing import Setup, simulate
from agentenv.testing.clock import VirtualClock
from agentenv.testing.fixtures import Bench
from agentenv.testing.tokenizers import CharTokenizer

pytest_plugins = ("pytester",)

ENV = '''
from agentenv import AgentInstance, StepResult

class Echo(AgentInstance):
    """Over when the action is the label; three attempts."""

    def __init__(self, most=3):
        self.most = most

    async def step(self, states):
        right = states["action_text"] == states["label"]
        over = right or states["turn_index"] + 1 >= self.most
        said = [{"role": "user", "content": f"{states['action_text']!r} is wrong."}]
        return StepResult("" if over else said, reward=float(right), terminated=over, score=float(right))
'''
STRICT = """
[pytest]
addopts = --strict-markers --strict-config -p no:cacheprovider -p no:hypothesispytest
filterwarnings =
    error
    ignore:The configuration option "asyncio_default_fixture_loop_scope" is unset
"""


@pytest.fixture
def project(pytester):
    """Somebody's project: an environment and, in its ini file, every strictness that there is.

    Without hypothesis' plugin, which would import hypothesis anew for the end of every suite.
    """
    pytester.makepyfile(my_env=ENV)
    pytester.makefile(".ini", pytest=STRICT)
    return pytester


def passes(project, num, *args):
    result = project.runpytest_inprocess(*args)
    result.assert_outcomes(passed=num)
    return result


MARKED = """
    import pytest
    from agentenv import Task
    from my_env import Echo

    TASK = Task("Say yes.", "yes")

    @pytest.mark.agentenv(Echo, policy=["no", "yes"], data=TASK)
    def test_by_class(episode):
        assert (episode.reward, len(episode.turns)) == (1.0, 2)

    @pytest.mark.agentenv("my_env:Echo", ["no"], env_kwargs={"most": 2}, data=TASK, seed=5)
    def test_by_name(episode, env, run_episode):
        assert episode.reward == 0.0
        assert env.source().cls is Echo
        assert [task.label for task in env.tasks()] == ["yes"]
        assert run_episode(policy=["yes"]).reward == 1.0
        assert run_episode(policy=["no"], env_kwargs={"most": 1}).turns[-1].result.terminated

    def test_without_a_mark(run_episode, run_group, run_episodes, scripted_engine):
        assert run_episode(Echo, ["yes"], data=TASK).reward == 1.0
        group = run_group(Echo, lambda request: "yes" if request.sampling.seed % 2 else "no", data=TASK, n=6)
        assert len(group.trajectories) == 6
        assert len({trajectory.episode_id for trajectory in group.trajectories}) == 6
        engine = scripted_engine(["yes"], crash_at=0)
        tasks = [TASK, {"prompt": "Say no.", "label": "no"}]
        found = run_episodes(Echo, engine, data=tasks, num_samples=2, concurrency=1)
        assert [trajectory.reward for trajectory in found] == [None, 1.0, 0.0, 0.0]
        assert found[0].error.kind == "infra"
"""
ASYNC = """
    import asyncio
    import pytest
    from agentenv import Task
    from my_env import Echo

    pytestmark = pytest.mark.asyncio

    async def test_awaited(run_episode, run_group):
        assert (await run_episode(Echo, ["yes"], data=Task("Say yes.", "yes"))).reward == 1.0
        assert len((await run_group(Echo, ["yes"], data=Task("Say yes.", "yes"), n=2)).trajectories) == 2

    @pytest.mark.agentenv(Echo, data=Task("Say yes.", "yes"))
    async def test_step_by_step(env):
        async with env.stepped() as episode:
            await episode.begin()
            assert (await episode.act("no")).observation[0]["content"] == "'no' is wrong."
            assert (await episode.act("yes")).terminated
"""


@pytest.mark.long
def test_a_project_uses_markers_and_fixtures(project):
    project.makepyfile(test_marked=MARKED)
    passes(project, 3)


@pytest.mark.long
def test_an_episode_that_an_async_test_forgot_to_await_fails_the_test(project):
    """A bug once: nothing was played, and the test passed."""
    project.makepyfile("""
    import pytest
    from agentenv import Task

    @pytest.mark.asyncio
    async def test_forgets(run_episode, run_group):
        run_episode("my_env:Echo", ["42"], data=Task("?", "42"))
        await run_episode("my_env:Echo", ["42"], data=Task("?", "42"))
        assert run_group("my_env:Echo", ["42"], data=Task("?", "42"))
    """)
    result = project.runpytest_inprocess()
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*run_episode: expected await in an async test, got 2 calls without. Await them."])


@pytest.mark.long
def test_async_tests_await_the_same_fixtures(project):
    project.makepyfile(test_async=ASYNC)
    passes(project, 2)


@pytest.mark.slow  # starts a process; `make test` runs this suite in two
def test_a_suite_in_processes(project):
    project.makepyfile(test_marked=MARKED)
    passes(project, 3, "-n", "1", "-p", "no:cov")


THEIRS = """
    import pytest

    @pytest.fixture
    def virtual_clock():
        return "12:00"

    @pytest.mark.asyncio
    async def test_their_fixtures_are_theirs(virtual_clock, episode, golden):
        assert (virtual_clock, episode, golden) == ("12:00", "S01E01", "gold")

    def test_lists_are_compared_as_ever():
        assert [1, 2] == [1, 3]
"""
THEIR_PLUGIN = """
    import pytest

    @pytest.fixture
    def episode():
        return "S01E01"

    @pytest.fixture
    def golden():
        return "gold"
"""


@pytest.mark.long
def test_a_suite_that_does_not_use_it_is_left_alone(project):
    project.makepyfile(test_theirs=THEIRS, their_plugin=THEIR_PLUGIN)
    project.syspathinsert()
    result = project.runpytest_inprocess("-p", "their_plugin")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*At index 1 diff: 2 != 3*"])
    result.stdout.no_fnmatch_line("*token ids*")


@pytest.mark.parametrize("package", [agentenv, agentenv_envs])
def test_pytest_does_not_warn_of_a_program_that_has_imported_it(package):
    from _pytest.assertion.rewrite import AssertionRewriter

    assert AssertionRewriter.is_rewrite_disabled(package.__doc__)


@pytest.mark.long
def test_loading_the_plugin_loads_nothing_heavy():
    code = (
        "import sys, agentenv.testing.pytest_plugin\n"
        "heavy = {'torch', 'transformers', 'gymnasium', 'numpy', 'hypothesis',\n"
        "         'agentenv.chat.chat', 'agentenv.episode.registry'}\n"
        "sys.exit(len(heavy & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_can_be_had():
    assert set(agentenv.testing.__all__) <= set(dir(agentenv.testing))
    assert all(getattr(agentenv.testing, name) is not None for name in agentenv.testing.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        agentenv.testing.nothing  # noqa: B018


def test_the_current_event_loop_is_left_as_it_was():
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        Bench().run_episode("guess_number", ["8"])
        assert asyncio.get_event_loop() is loop
    finally:
        asyncio.set_event_loop(None)
        loop.close()


WRONG = {
    "def test_it(episode): pass": '*episode: expected a test with @pytest.mark.agentenv("NAME"*',
    "def test_it(env): pass": '*env: expected a test with @pytest.mark.agentenv("NAME"*',
    "def test_it(run_episode): run_episode()": "*run_episode: expected a test with*",
    "def test_it(run_episode): run_episode('gues_number', [])": "*Did you mean 'guess_number'?*",
    "def test_it(run_episode): run_episode('guess_number', 'text')": "*expected replies in a list, got 'text'*",
    "def test_it(run_episode): run_episode('guess_number', [])": "*expected replies in a list, got [[][]]*",
    "def test_it(run_episode): run_episode('guess_number', [''], data={'prompt': '?'})": "*Put it in a list.",
    "def test_it(run_episode): run_episode('guess_number', [''], {})": "*expected env and policy, then keywords*",
    "import pytest\n@pytest.mark.agentenv('guess_number', polcy=[])\ndef test_it(episode): pass": (
        "*expected *of env, policy, env_kwargs, *expects_error, got *polcy*"
    ),
    "import pytest\nfrom agentenv import Task\n@pytest.mark.agentenv('guess_number', ['5'], Task('x', '5'))\n"
    "def test_it(episode): pass": "*pytest.mark.agentenv: expected env and policy, then keywords, got 3 *data=*",
}


@pytest.mark.long
def test_errors_are_reported_in_one_line(project):
    project.makepyfile(**{f"test_{i}": test for i, test in enumerate(WRONG)})
    result = project.runpytest_inprocess("--tb=short")
    result.assert_outcomes(failed=6, errors=4)
    result.stdout.fnmatch_lines_random([f"E {line}" for line in WRONG.values()])


def test_one_episode_of_the_first_task_is_run(run_episode, scripted_engine):
    engine = scripted_engine(["8"])
    assert run_episode("guess_number", engine).task.label == "1"
    assert {request.episode_id for request in engine.requests} == {"000000/0"}


def test_the_maximum_number_of_turns_of_a_class_holds_in_tests_as_in_runs(run_episode):
    class Four(AgentInstance):
        max_turns = 4

        async def step(self, states):
            return StepResult("Go on.")

    assert len(run_episode(Four, ["a"]).turns) == 4
    assert len(run_episode(Four, ["a"], limits=Limits(max_turns=5)).turns) == 5
    assert len(simulate(Setup(Four, ["a"])).trajectories[0].turns) == 4


def test_the_maximum_length_of_a_class_counts_tokens_not_the_characters_of_the_stand_in():
    class Short(AgentInstance):
        max_length = 60

        async def step(self, states):
            return StepResult(reward=1.0, terminated=True)

    assert Setup(Short).episode_limits().max_length == 8192
    assert Setup(Short, tokenizer=CharTokenizer()).episode_limits().max_length == 60


FAILING = """
    import pytest
    from agentenv import AgentInstance

    class Lost(AgentInstance):
        async def step(self, states):
            return states["no such key"]

    @pytest.mark.agentenv(Lost, ["go"])
    def test_unexpected(episode):
        raise AssertionError("set-up let a failed episode pass")

    @pytest.mark.agentenv(Lost, ["go"], expects_error=True)
    def test_expected(episode):
        assert episode.error.type == "KeyError"
"""


def test_an_episode_that_failed_fails_the_test_in_set_up_unless_the_marker_expects_an_error(project):
    project.makepyfile(test_lost=FAILING)
    result = project.runpytest_inprocess()
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(
        ["*EpisodeFailed: episode: expected an episode without an error, got KeyError in step at *test_lost.py:6: *",
         "*expects_error=True*", '*return states?"no such key"?*']
    )  # fmt: skip


def test_seeds_are_those_of_a_run(run_episode):
    one, again, other = (run_episode("guess_number", ["8"], seed=seed) for seed in (1, 1, 2))
    assert one.seed == again.seed != other.seed


def test_the_tiny_model_is_a_folder(tiny_model):
    assert (Path(tiny_model) / "config.json").is_file()


@pytest.mark.slow  # a real model
def test_time_stands_still_while_a_model_generates(tiny_model, run_episode):
    from agentenv.engines.models import load_tokenizer
    from agentenv.engines.opening import open_engine

    tokenizer = load_tokenizer(tiny_model)

    async def play():
        async with open_engine("hf", tiny_model, tokenizer) as engine:
            return await run_episode("math_retry", engine, tokenizer=tokenizer)

    with VirtualClock(patience_s=120.0) as clock:  # its first generation takes longer than 5 s on a busy machine
        assert clock.run(play()).error is None
        assert (clock.elapsed_s, clock._loop.num_stalls) == (0.0, 0)


CLOCKED = """
    import asyncio
    import pytest
    from agentenv import Limits, StopReason, Task
    from hypothesis import HealthCheck, given, settings, strategies as st
    from my_env import Echo

    TASK = Task("Say yes.", "yes")

    async def test_async_tests_run_on_it(virtual_clock, run_episode, scripted_engine):
        await asyncio.sleep(3600)
        engine = scripted_engine(["no"], latency_s=10.0)
        assert (await run_episode(Echo, engine, data=TASK)).reward == 0.0
        assert virtual_clock.elapsed_s == 3630

    class TestInAClass:
        async def test_methods_too(self, virtual_clock):
            await asyncio.sleep(3600)
            assert virtual_clock.elapsed_s == 3600

    @settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(seconds=st.integers(1, 3600))
    async def test_examples_do(virtual_clock, seconds):
        began_s = virtual_clock.elapsed_s
        await asyncio.sleep(seconds)
        assert virtual_clock.elapsed_s == began_s + seconds

    def test_plain_tests_do(virtual_clock, run_episode, scripted_engine):
        limits = Limits(episode_timeout_s=25.0)
        episode = run_episode(Echo, scripted_engine(["no"], latency_s=10.0), data=TASK, limits=limits)
        assert episode.stop_reason is StopReason.EPISODE_TIMEOUT
        assert virtual_clock.elapsed_s == 25
"""


@pytest.mark.long
@pytest.mark.parametrize("args", [(), ("-p", "no:asyncio"), ("-o", "asyncio_mode=auto")])
def test_tests_on_the_virtual_clock(project, args):
    project.makepyfile(test_clocked=CLOCKED)
    passes(project, 4, *args)


def test_a_setup_of_a_file_for_openrlhf_plays_its_environment_with_what_it_gets_there(tmp_path):
    file = tmp_path / "agent_func.py"
    file.write_text(
        "from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor\n\n\n"
        "class Door(AgentInstanceBase):\n"
        "    def __init__(self, reward):\n        self.reward = reward\n\n"
        "    async def reset(self, states):\n        return {'observation': states['observation'] + 'Door: '}\n\n"
        "    async def step(self, states):\n"
        "        return {'rewards': self.reward, 'environment_feedback': '', 'done': True}\n\n\n"
        "class AgentExecutor(MultiTurnAgentExecutor):\n    agent_cls, agent_kwargs = Door, {'reward': 0.5}\n"
    )
    (trajectory,) = simulate(Setup(str(file), ["open"], data=Task("Open it."))).trajectories
    assert (trajectory.error, trajectory.reward) == (None, 0.5)
    assert trajectory.prompt.endswith("assistant\nDoor: ")
