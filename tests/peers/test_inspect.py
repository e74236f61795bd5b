"""Tasks of Inspect 0.3.285, in its own eval, as our environments."""

import pytest

from tests.peers.where import ROOT, answer, needs, trained, versions

pytestmark = [pytest.mark.slow, needs("inspect", "inspect_ai"), pytest.mark.timeout(900)]

FILE = ROOT / "tests/peers/inspect_tasks/small.py"


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    return answer("inspect", ROOT / "tests/peers/inspect_samples.py", FILE, cwd=tmp_path_factory.mktemp("inspect"))


def test_the_policy_answers_the_solver_and_the_scorer_decides_the_reward(played):
    right = played["right"]
    assert (right["reward"], right["score"], right["stop"], right["actions"]) == (1.0, 1.0, "terminated", ["4"])
    assert right["info"] == {"match": 1.0, "num_messages": 3.0, "limit": ""}
    assert "Answer with a number." in right["text"]
    assert "What is 2 + 2?" in right["text"]
    assert (played["wrong"]["reward"], played["wrong"]["stop"]) == (0.0, "terminated")
    assert played["choice"]["reward"] == 1.0


def test_a_letter_is_the_number_that_inspect_gives_it_and_the_first_of_two_scorers_is_the_reward(played):
    assert played["partial"]["info"] == {"close": 0.5, "match": 1.0, "num_messages": 4.0, "limit": ""}
    assert (played["partial"]["reward"], played["partial"]["actions"]) == (0.5, ["3", "4"])


def test_tools_run_in_inspects_process_and_the_conversation_is_one_segment(played):
    tools = played["tools"]
    assert (tools["reward"], tools["segments"], len(tools["actions"])) == (1.0, 1, 3)
    assert "Add two numbers." in tools["text"]
    assert "incorrect" in tools["text"]  # basic_agent's answer to the first submission
    assert (played["react"]["reward"], played["react"]["segments"]) == (1.0, 1)
    assert (played["tool_error"]["reward"], "too large" in played["tool_error"]["text"]) == (1.0, True)


def test_a_failed_scorer_or_tool_is_no_reward_and_what_is_outside_is_infrastructure(played):
    assert played["broken_scorer"]["reward"] is None
    kind, message = played["broken_scorer"]["error"]
    assert (kind, "got ValueError: the scorer broke" in message) == ("contract", True)
    kind, message = played["outside"]["error"]
    assert (kind, "got OSError: the calculator is away" in message) == ("infra", True)
    kind, message = played["two_values"]["error"]
    assert (kind, "expected one value of the first scorer, got {'length': 1" in message) == ("contract", True)


def test_inspects_scorers_judge_an_episode_that_a_limit_of_ours_ends(played):
    assert (played["cut"]["stop"], played["cut"]["reward"]) == ("max_turns", 0.0)
    assert (played["cut"]["info"]["limit"], played["cut"]["info"]["close"]) == ("turn", 0.0)


def test_the_policy_never_grades_itself_and_another_model_may(played):
    for task in ("graded", "self_graded"):
        assert "got one that asks the policy" in played[task]["error"][1]
        assert played[task]["reward"] is None
    assert (played["stand_in"]["reward"], played["stand_in"]["info"]["model_graded_qa"]) == (1.0, 1.0)


def test_tasks_with_a_sandbox_without_a_scorer_and_unknown_ones_are_refused(played):
    assert "expected a task without a sandbox, got local" in played["sandbox"]["error"][1]
    assert "expected a task with a scorer, got none" in played["unscored"]["error"][1]
    assert "got 'nothing'" in played["unknown"][0]
    assert "expected FILE.py@TASK or PACKAGE/TASK" in played["unknown"][1]
    assert "expected one task, got 0" in played["not_in_it"]["error"][1]


def test_tasks_of_installed_packages_are_listed_and_run(played):
    assert {"small_evals/arithmetic", "small_evals/reacting"} <= set(played["names"])
    assert played["of_a_package"]["reward"] == 1.0


def test_the_seed_chooses_the_sample_and_env_kwargs_are_arguments_of_the_task(played):
    assert played["other_seed"][-1] == ["user", "What is 2 + 3?"]
    assert played["configured"][0] == ["system", "Only digits."]
    (first, second), other = played["shuffled"]
    assert first == second != other


def test_a_killed_process_of_inspect_is_infrastructure_and_the_next_episode_has_another(played):
    error, prompt = played["killed"]
    assert error.startswith("InfraError: ")
    assert prompt[-1] == ["user", "What is 2 + 2?"]


def test_ten_steps_of_training_on_a_task(tmp_path, cell):
    env = f"inspect:{FILE}@arithmetic"
    figures = trained("inspect", env, tmp_path)
    assert (figures["train_steps"], figures["episodes"]) == (10, 40)
    named = versions("inspect", "inspect-ai")
    cell("inspect:small.py@arithmetic", "agentenv train", "on a CPU, transformers", named, **figures)
