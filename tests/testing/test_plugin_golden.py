"""Differences of trajectories, with the text of tokens, and golden traces: recorded and compared."""

import json
from dataclasses import replace
from math import nan

import pytest

from agentenv import Completion, StepResult, StopReason, Task
from agentenv.errors import ConfigError, DataError
from agentenv.testing import assert_same_trajectory, trajectory_diff
from agentenv.testing.fixtures import Bench
from agentenv.testing.golden import Golden
from agentenv.testing.tokenizers import CharTokenizer
from tests.testing.test_plugin_episodes import ENV, STRICT

pytest_plugins = ("pytester",)
TOKENIZER = CharTokenizer()


def guesses(*actions, **options):
    return Bench().run_episode("guess_number", list(actions), data=Task("Guess my number.", "5"), **options)


def test_the_first_token_that_differs_is_shown_with_its_text_and_log_probability():
    one, other = guesses("8", "5"), guesses("8", "6")
    with pytest.raises(AssertionError) as raised:
        assert_same_trajectory(one, other, tokenizer=TOKENIZER)
    text, at = str(raised.value), len(one.token_ids) - 2
    assert f"segment 0: {at + 2} and {len(other.token_ids)} tokens, the first that differs is {at}" in text
    assert f"  > {at:5}  55 '5' action -0.5 " in text
    assert " 56 '6' action -0.5\n" in text
    assert "assistant\\n⟪here⟫5<|im_end|>" in text
    assert "assistant\\n⟪here⟫6<|im_end|>" in text
    assert "turns[1].action: left '5', right '6'" in text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.segments[0].action_mask.__setitem__(0, 1), "same tokens, other action_mask, the first at 0"),
        (lambda t: t.segments[0].rewards.__setitem__(-1, 9.0), "same tokens, other rewards"),
        (lambda t: t.segments[0].logprobs.__setitem__(-1, -0.75), "same tokens, other logprobs"),
        (lambda t: t.segments[0].token_ids.pop(), "the first that differs is"),
        (lambda t: setattr(t, "stop_reason", StopReason.ABORTED), "stop_reason: left 'terminated', right 'aborted'"),
        (lambda t: setattr(t.turns[0], "bridge", "truncated"), "turns[0].bridge: left 'exact', right 'truncated'"),
        (lambda t: t.turns.pop(), "turns[1]"),
        (lambda t: setattr(t.turns[1], "result", None), "turns[1].result"),
        (lambda t: t.segments.append(t.segments[0]), "segments: left 1, right 2"),
    ],
)
def test_every_fact_is_compared(change, says):
    left, right = guesses("8", "5"), guesses("8", "5")
    change(right)
    assert any(says in line for line in trajectory_diff(left, right)), trajectory_diff(left, right)


def test_times_and_ids_are_not_compared():
    left, right = guesses("8", "5"), guesses("8", "5")
    right.wait_s, right.turns[0].generate_s, right.episode_id, right.attempt = 99.0, 99.0, "other", 3
    assert trajectory_diff(left, right) == []


def test_numbers_within_the_tolerance_are_the_same_and_so_is_nan():
    left, right = (guesses(Completion((70, 71), logprobs=(nan, -0.5 - off)), "5") for off in (0.0, 1e-6))
    assert trajectory_diff(left, right, tolerance=1e-5) == []
    assert trajectory_diff(left, right, tolerance=1e-8) != []


# --- in a project -----------------------------------------------------------------------------------------------------


@pytest.fixture
def project(pytester):
    pytester.makepyfile(my_env=ENV)
    pytester.makefile(".ini", pytest=STRICT)
    return pytester


GOLDEN = """
    import pytest
    from agentenv import Task
    from my_env import Echo

    SAID = ["no", "yes"]

    class TestEcho:
        @pytest.mark.parametrize("most", [2, 3], ids=["2/2", "2_3"])
        def test_it(self, run_episode, golden, most):
            golden(run_episode(Echo, SAID, env_kwargs={"most": most}, data=Task("Sag ja: \\u00e9.", "yes")))
            golden(run_episode(Echo, ["yes"], data=Task("Say yes.", "yes")), "at once")
"""


@pytest.mark.long
def test_traces_are_recorded_only_when_asked_and_compared_ever_after(project):
    file = project.makepyfile(test_golden=GOLDEN)
    result = project.runpytest_inprocess()
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*expected a trace, got none*--agentenv-record*"])
    assert not (file.parent / "golden").exists()

    project.runpytest_inprocess("--agentenv-record").assert_outcomes(passed=2)
    traces = sorted(path.name for path in (file.parent / "golden" / "test_golden").iterdir())
    assert len(traces) == 4, traces
    before = {name: (file.parent / "golden/test_golden" / name).read_text() for name in traces}
    assert "Sag ja: é." in "".join(before.values())

    project.runpytest_inprocess().assert_outcomes(passed=2)
    file.write_text(file.read_text().replace('"no", "yes"', '"nö", "yes"'))
    result = project.runpytest_inprocess()
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        ["*the episode is not what it was*", "*the first that differs is*", "*golden*⟪here⟫o<|im_end|>*",
         "*now*⟪here⟫ö*", "*turns*0*.action: golden 'no', now 'nö'*", "*--agentenv-record and look at the change of*"]
    )  # fmt: skip
    assert {name: (file.parent / "golden/test_golden" / name).read_text() for name in traces} == before


def recorded(tmp_path, trajectory, name=""):
    Golden(tmp_path, "test", record=True)(trajectory, name)
    return Golden(tmp_path, "test")


def test_a_trace_is_readable_and_the_same_for_every_run(tmp_path):
    recorded(tmp_path, guesses("8", "5"))
    text = (tmp_path / "test.json").read_text()
    values = json.loads(text)
    assert '"action": "8"' in text
    assert "generate_s" not in text
    assert values["wait_s"] == 0.0
    ids = ", ".join(map(str, guesses("8", "5").token_ids))
    assert f'"token_ids": [{ids}]' in text
    recorded(tmp_path, guesses("8", "5"))
    assert (tmp_path / "test.json").read_text() == text


def test_a_failed_episode_has_a_trace_without_paths(tmp_path):
    from agentenv.core.agent import AgentInstance

    class Fails(AgentInstance):
        async def step(self, states):
            raise RuntimeError("no \ud800 surrogate")

    failed = Bench().run_episode(Fails, ["x"])
    assert failed.error.place
    recorded(tmp_path, failed)(failed)
    assert str(__file__) not in (tmp_path / "test.json").read_text()


def test_a_name_is_used_once(tmp_path):
    golden = recorded(tmp_path, guesses("5"))
    golden(guesses("5"))
    with pytest.raises(ConfigError, match="a different name"):
        golden(guesses("5"))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"v": 1'])
def test_a_broken_trace_is_named_as_such(tmp_path, content):
    (tmp_path / "test.json").write_text(content)
    with pytest.raises(DataError):
        Golden(tmp_path, "test")(guesses("5"))


def test_rewards_may_differ_by_rounding_alone(tmp_path):
    golden = recorded(tmp_path, guesses("5"), "a")
    other = guesses("5")
    other.turns[0].result = replace(other.turns[0].result, reward=other.turns[0].result.reward + 1e-9)
    golden(other, "a")
    other.turns[0].result = StepResult(reward=other.turns[0].result.reward + 1e-3, terminated=True)
    with pytest.raises(AssertionError, match="reward"):
        Golden(tmp_path, "test")(other, "a")


def test_files_of_different_names_are_different(tmp_path):
    names = ["a/b", "a_b", "a b", "é", "è", "x" * 200, "x" * 201, "", "A"]
    assert len({Golden(tmp_path, "t").path(name) for name in names}) == len(names)
