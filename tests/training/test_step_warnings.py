"""A training that cannot learn says so: the conditions one by one, in real trainings, and how often they are shown."""

import pytest

from agentenv.training.config import TrainConfig
from agentenv.training.logs.journal import read_metrics
from agentenv.training.logs.step_warnings import RepeatedWarnings, StepWarning, check_step
from tests.drivers import command
from tests.training.trainings import flags, make_place

HEALTHY = {
    "rollout/reward": 0.5, "rollout/reward_std": 0.4, "rollout/reward/zero_spread_share": 0.5, "rollout/turns": 1.0,
    "rollout/stop/terminated": 0.5, "rollout/stop/max_length": 0.5, "rollout/num_rejected_failed": 1.0,
    "train/grad_norm": 0.3, "train/policy_loss": -0.01, "train/num_tokens": 900.0, "train/num_dropped_tokens": 0.0,
    "train/kl": 0.2, "train/approx_kl": 0.01, "train/logprob_diff": 0.02, "train/entropy": 0.3,
}  # fmt: skip
FLAT = {"rollout/reward/zero_spread_share": 1.0}
CONSTANT = FLAT | {"rollout/reward": -0.4, "rollout/reward_std": 0.0}


def config(**changes):
    return TrainConfig.from_flags(**{"env": "math_retry", "actor_learning_rate": 1e-4, **changes})


def names(numbers, **changes):
    return [each.name for each in check_step(HEALTHY | numbers, config(**changes))]


def text(numbers, **changes):
    (warning,) = check_step(HEALTHY | numbers, config(**changes))
    return warning.text


def test_a_healthy_step_has_no_warnings_nor_has_one_without_numbers():
    assert names({}) == []
    assert check_step({}, config()) == []


# Name of the condition, numbers in which it holds, flags, part of its text, and numbers in which it just does not hold.
HOLDS = {
    "failed": ({"rollout/num_rejected_failed": 16.0}, {}, "16 tasks were left out because their episodes failed",
        {"rollout/num_rejected_failed": 15.0}),
    "constant_reward": (CONSTANT, {}, "every episode has the reward -0.400", {"rollout/reward_std": 1e-9}),
    "no_spread": (FLAT, {}, "no task has two episodes with different rewards",
        {"rollout/reward/zero_spread_share": 0.99}),
    "zero_gradient": ({"train/grad_norm": 0.0}, {}, "the gradient is 0, so nothing is learned. Widen --reward_clip",
        {"train/grad_norm": 1e-9}),
    "no_tokens": ({"train/num_tokens": 0.0, "train/num_dropped_tokens": 70.0}, {"is_correction": "tis"},
        "70 tokens are left out because the engine returned no log-probability", {"train/num_tokens": 1.0}),
    "truncated": ({"rollout/stop/terminated": 0.0, "rollout/stop/max_turns": 0.4, "rollout/stop/error": 0.1}, {},
        "limits cut off every episode, most of them max_length. Raise --max_length",
        {"rollout/stop/terminated": 0.01, "rollout/stop/max_turns": 0.49}),
    "learning_rate": ({}, {"actor_learning_rate": 1e-16}, "the learning rate 1e-16 changes no weight", None),
    "kl": ({"train/kl": 1.5}, {"init_kl_coef": 0.01}, "the initial model is 1.5 nats per token", {"train/kl": 0.9}),
    "logprob_diff": ({"train/logprob_diff": 0.92}, {}, "differ by 0.92 nats per token. Add --is_correction tis",
        {"train/logprob_diff": 0.09}),
    "entropy": ({"train/entropy": 0.001}, {}, "the entropy is 0.001 nats per token", {"train/entropy": 0.01}),
}  # fmt: skip


@pytest.mark.parametrize("name", HOLDS)
def test_a_condition_is_found_alone_with_what_to_do_and_not_before_its_bound(name):
    numbers, changes, part, below = HOLDS[name]
    assert names(numbers, **changes) == [name]
    assert part in text(numbers, **changes)
    assert "--" in text(numbers, **changes) or name in ("failed", "constant_reward")
    if below is not None:
        assert names(below, **changes) == []


def test_episodes_that_use_all_turns_may_consist_of_actions_that_the_environment_refuses():
    numbers = {"rollout/stop/terminated": 0.0, "rollout/stop/max_length": 0.0, "rollout/stop/max_turns": 1.0}
    found = text(numbers)
    assert "every episode, most of them max_turns" in found
    assert "If the environment refuses the actions, say their form in the prompt" in found
    assert "refuses" not in text(numbers | {"rollout/stop/max_turns": 0.0, "rollout/stop/max_length": 1.0})


def test_a_step_in_which_a_constraint_forced_every_token_names_the_constraint_and_not_the_engine():
    found = text({"train/num_tokens": 0.0, "train/num_dropped_tokens": 0.0})
    assert "a constraint forced every token" in found
    assert "log-probability" not in found


SEVERAL = {"rollout/turns": 2.5}
NO_END = {"rollout/stop/terminated": 0.0}
EXPLAINED = [
    *((FLAT, {"advantage_estimator": name}, []) for name in ("reinforce", "flash_reinforce", "gae")),
    *((CONSTANT, {"advantage_estimator": name}, ["constant_reward"]) for name in ("reinforce", "gae")),
    # Equal rewards of episodes that earn them in different turns are learned from.
    (FLAT | SEVERAL, {}, []),
    (CONSTANT | SEVERAL, {}, []),
    (FLAT | SEVERAL, {"credit": "episode"}, ["no_spread"]),
    (CONSTANT | SEVERAL, {"credit": "episode"}, ["constant_reward"]),
    (FLAT | SEVERAL | {"train/policy_loss": 0.0, "train/grad_norm": 0.0}, {}, ["no_spread"]),
    (FLAT | SEVERAL, {"init_kl_coef": 0.1}, ["no_spread"]),  # the loss has the divergence too
    # Episodes that their environment truncates, or that fail, are no sign of a limit too low.
    (NO_END | {"rollout/stop/truncated_by_env": 0.5}, {}, []),
    (NO_END | {"rollout/stop/max_length": 0.0, "rollout/stop/error": 1.0}, {}, []),
    ({"train/logprob_diff": 0.92}, {"is_correction": "tis"}, []),
]


@pytest.mark.parametrize(("numbers", "changes", "expected"), EXPLAINED)
def test_a_condition_that_other_numbers_or_flags_explain_is_no_warning(numbers, changes, expected):
    assert names(numbers, **changes) == expected


def test_a_gradient_of_zero_names_the_flag_that_drops_all_tokens_and_a_frozen_policy_has_none():
    dropped = {"train/grad_norm": 0.0, "train/is_rejected": 1.0}
    assert "Widen --is_correction_threshold" in text(dropped, is_correction="icepop")
    frozen = {key: value for key, value in HEALTHY.items() if key != "train/grad_norm"}
    assert check_step(frozen, config()) == []


def test_rewards_are_judged_as_trained_after_the_penalties():
    """One that makes them equal is named instead of the clip; one that makes them differ is learned from."""
    equal = {"train/reward": -1.0, "train/reward_std": 0.0, "train/zero_spread_share": 1.0, "train/grad_norm": 0.0}
    assert "every episode has the reward -1.000 after the penalties, so nothing is learned" in text(equal)
    assert names(equal | {"train/reward_std": 0.5}) == ["no_spread"]
    differ = {"train/reward": 0.5, "train/reward_std": 0.5, "train/zero_spread_share": 0.0}
    assert names(CONSTANT | differ) == []


def test_a_difference_of_log_probabilities_may_come_from_top_p():
    assert text({"train/logprob_diff": 0.92}, top_p=0.9).endswith("Set --top_p 1")


def test_a_policy_that_moves_too_far_within_a_step_is_told_apart_from_one_far_from_the_reference():
    assert "within the step. Lower --actor_learning_rate or --max_epochs" in text({"train/approx_kl": 3.0})


def shown(*steps):
    """The names that are shown, by step, for the names that hold in each step."""
    repeated, found = RepeatedWarnings(), {}
    for number, step in enumerate(steps, start=1):
        if due := repeated.due([StepWarning(name, "text", "") for name in step.split()]):
            found[number] = " ".join(each.name for each in due)
    return found


def test_a_warning_is_shown_at_its_first_step_and_again_after_ten_in_a_row():
    assert shown(*["no_spread"] * 40) == {1: "no_spread", 10: "no_spread"}
    assert shown("", *["kl"] * 40) == {2: "kl", 11: "kl"}


def test_a_condition_that_comes_and_goes_is_shown_once():
    assert shown("kl", "", "kl", "kl entropy", "entropy", "kl") == {1: "kl", 4: "entropy"}
    assert shown("kl", "", *["kl"] * 12) == {1: "kl", 12: "kl"}


def test_steps_without_spread_by_chance_are_not_shown_in_the_middle_of_a_training():
    assert shown("", *["no_spread"] * 9, "", "constant_reward") == {}
    assert shown("", *["no_spread"] * 10) == {11: "no_spread"}


# --- in a training ----------------------------------------------------------------------------------------------------

REWARDS = """
from agentenv import AgentInstance, StepResult
from agentenv.errors import InfraError


class Given(AgentInstance):
    async def step(self, states):
        label, text = states["label"], states["action_text"]
        if label == "raises":
            raise InfraError("no service")
        reward = sum(each.islower() for each in text) / max(1, len(text)) if label == "letters" else float(label)
        return StepResult("Go on.", reward=reward, terminated=label != "endless")
"""
TRAININGS = {
    "no_spread": ("0.25 0.75", "", "no task has two episodes with different rewards"),
    "zero_gradient": ("letters", "--reward_clip_range 5 9", "Widen --reward_clip_range"),
    "kl": ("letters", "--actor_learning_rate 1 --init_kl_coef 1e-9 --max_train_steps 2", "the initial model"),
    "logprob_diff": ("letters", "--async_train --actor_learning_rate 0.3", "Add --is_correction tis"),
    "failed": ("raises raises raises letters", "--max_error_share 1 --max_retries 0", "because their episodes failed"),
}
"""Labels of the tasks, further flags, and a part of the warning."""


@pytest.mark.long
@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_that_cannot_learn_says_so_and_records_it(tmp_path, monkeypatch, capfd, name):
    labels, more, part = TRAININGS[name]
    make_place(tmp_path, monkeypatch, labels.split())
    (tmp_path / "given.py").write_text(REWARDS)
    assert command(flags(*more.split(), env="given.py:Given")) == 0
    (line,) = [each for each in capfd.readouterr().err.splitlines() if part in each]
    assert line.startswith("warning: step ")
    show = line.partition("Episodes: agentenv ")[2]
    assert show == f"show out {'--failed' if name == 'failed' else '--worst 3'}"
    assert command(show.split()) == 0
    assert ("no service" if name == "failed" else "Say") in capfd.readouterr().out
    step = int(line.split()[2].rstrip(":"))
    assert [name in row.get("warnings", []) for row in read_metrics(tmp_path / "out")].index(True) + 1 == step


@pytest.mark.long
def test_an_evaluation_before_the_first_step_hides_no_warning_of_it(tmp_path, monkeypatch, capfd):
    make_place(tmp_path, monkeypatch, ["-0.4", "-0.4"])
    (tmp_path / "given.py").write_text(REWARDS)
    assert command(flags("--eval_dataset", "tasks.jsonl", "--max_train_steps", 1, env="given.py:Given")) == 0
    assert "warning: step 1: every episode has the reward -0.400" in capfd.readouterr().err


@pytest.mark.long
def test_a_training_in_which_limits_end_every_episode_says_so(tmp_path, monkeypatch, capfd):
    make_place(tmp_path, monkeypatch)
    assert command(flags("--max_turns", 1, "--max_train_steps", 1, env="env.py:Turns")) == 0
    assert "limits cut off every episode, most of them max_turns. Raise --max_turns" in capfd.readouterr().err
