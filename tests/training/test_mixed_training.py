"""A training on several environments: by weight, resumed to the same numbers, with curves of each environment."""

from collections import Counter

import pytest

from agentenv import read_trajectories
from agentenv.training.logs.journal import read_metrics
from tests.drivers import command
from tests.training.trainings import assert_same_numbers, flags, make_place, rows

MIX = """
- {env: "env.py:Letters", data: tasks.jsonl}
- {env: "env.py:Turns", data: tasks.jsonl, weight: 0.5, max_length: 512}
- {env: "env.py:OwnLoop", data: tasks.jsonl, name: own, weight: 0}
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    made = make_place(tmp_path, monkeypatch)
    (made / "mix.yaml").write_text(MIX)
    return made


def mixed(*more, **options):
    """A training of the mixture: three steps of three groups."""
    argv = flags(env="mix.yaml", **options)
    at = argv.index("--data")
    del argv[at : at + 2]
    argv[argv.index("--rollout_batch_size") + 1] = 3
    return [*argv, *more]


@pytest.mark.long
def test_a_mixture_of_three_shipped_environments_is_resumed_to_the_same_losses(tmp_path, monkeypatch):
    make_place(tmp_path, monkeypatch)
    three = ["--env", "math_retry", "guess_number:0.5", "tool_use:0.5"]
    argv = [
        "train", *three, "--model", "tiny-math", "--engine", "hf", "--no_ray", "--max_train_steps", 3,
        "--rollout_batch_size", 4, "--n", 4, "--max_tokens", 24, "--max_turns", 2,
        "--limit", 12, "--save_steps", 1,
        "--actor_learning_rate", 1e-4, "--progress", "plain", "--curriculum", "spread",
    ]  # fmt: skip
    assert command([*argv, "--out", "whole"]) == 0
    assert command([*argv, "--out", "parts", "--max_train_steps", 1]) == 0
    assert command([*argv, "--out", "parts", "--resume"]) == 0
    assert_same_numbers(tmp_path / "parts", tmp_path / "whole")
    ids = [[each.episode_id for each in read_trajectories(tmp_path / name)] for name in ("parts", "whole")]
    assert ids[0] == ids[1]
    lines = read_metrics(tmp_path / "whole")
    assert any(line["train/grad_norm"] > 0 for line in lines), "the losses say something"
    first = lines[0]
    assert {name: first[f"rollout/env/{name}/num_episodes"] for name in ("math_retry", "guess_number", "tool_use")} == {
        "math_retry": 8.0, "guess_number": 4.0, "tool_use": 4.0
    }  # fmt: skip
    keys = ("reward", "score", "pass@1", "pass@4", "action_tokens", "reward/std_in_group", "share")
    assert {f"rollout/env/math_retry/{key}" for key in keys} <= first.keys()


@pytest.mark.long
def test_groups_come_by_weight_each_with_its_environments_limits_and_a_weight_of_zero_is_left_out(place, capfd):
    assert command(mixed("--save_samples", 99)) == 0
    note = "note: no train step and no evaluation uses own: weight 0, and no data in --eval_dataset"
    assert note in capfd.readouterr().err
    episodes = list(read_trajectories(place / "out"))
    assert Counter(each.task.env for each in episodes) == {"Letters": 24, "Turns": 12}
    assert {(each.task.env, each.max_length) for each in episodes} == {("Letters", 2048), ("Turns", 512)}
    assert {each.task.env for each in episodes if len(each.turns) == 3} == {"Turns"}
    assert all(each.task.task_id.startswith(f"{each.task.env}/") for each in episodes)
    lines = read_metrics(place / "out")
    assert {key.split("/")[2] for line in lines for key in line if "/env/" in key} == {"Letters", "Turns"}
    for line in lines:
        own = [line[f"rollout/env/{name}/reward"] for name in ("Letters", "Turns")]
        assert line["rollout/reward"] == pytest.approx((2 * own[0] + own[1]) / 3), "each task counts once"


@pytest.mark.long
def test_an_environment_whose_groups_were_all_rejected_is_named_at_the_end(place, capfd):
    same = "class Same(AgentInstance):\n    async def step(self, states):\n"
    same += "        return StepResult(reward=0.0, score=0.0, terminated=True)\n"
    (place / "env.py").write_text((place / "env.py").read_text() + "\n\n" + same)
    (place / "mix.yaml").write_text(
        '- {env: "env.py:Letters", data: tasks.jsonl}\n- {env: "env.py:Same", data: tasks.jsonl}\n'
    )
    assert command(mixed("--dynamic_filtering")) == 0
    said = capfd.readouterr().err
    assert "note: no train step used Same: --dynamic_filtering kept none of their groups. A group" in said
    assert "must be between 0 and 1: score partial success, " in said


@pytest.mark.long
def test_held_out_sets_have_their_own_numbers_also_of_an_environment_that_is_not_trained_on(place, capfd):
    for name, num in (("held", 2), ("more", 4)):
        (place / name).mkdir()
        rows(place, ["ok"] * num)
        (place / "tasks.jsonl").rename(place / name / "set.jsonl")
    rows(place, ["ok"] * 8)
    sets = ["--eval_dataset", "Letters=held/set.jsonl", "Turns=more/set.jsonl", "own=tasks.jsonl"]
    assert command(mixed(*sets, "--eval_n_samples_per_prompt", 1, "--max_train_steps", 1)) == 0
    assert "no evaluation uses" not in capfd.readouterr().err
    line = read_metrics(place / "out")[0]
    names = ["Letters=held-set.jsonl", "Turns=more-set.jsonl", "tasks"]
    assert [line[f"eval/set/{name}/num_episodes"] for name in names] == [2.0, 4.0, 8.0]
    assert [line[f"eval/set/{name}/turns"] for name in names] == [1.0, 3.0, 2.0]
    assert line["eval/num_episodes"] == 14.0
    means = [line[f"eval/set/{name}/reward"] * num for name, num in zip(names, (2, 4, 8), strict=True)]
    assert line["eval/reward"] == pytest.approx(sum(means) / 14)


@pytest.mark.long
@pytest.mark.parametrize("is_mixture", [True, False], ids=["mixture", "one"])
def test_an_episode_passes_by_the_score_range_of_its_own_environment(place, is_mixture):
    tens = "class Tens(AgentInstance):\n    score_range = (0.0, 10.0)\n\n    async def step(self, states):\n"
    tens += "        return StepResult(reward=10.0, score=10.0, terminated=True)\n"
    (place / "tens.py").write_text(f"from agentenv import AgentInstance, StepResult\n\n\n{tens}")
    rows(place, ["ok"] * 8)
    (place / "held.jsonl").write_bytes((place / "tasks.jsonl").read_bytes())
    steps = ["--max_train_steps", 1]
    if is_mixture:
        (place / "mix.yaml").write_text(MIX.replace("env.py:Turns", "tens.py:Tens"))
        assert command(mixed("--eval_dataset", "Letters=tasks.jsonl", "Tens=held.jsonl", *steps)) == 0
        own = ["rollout/env/Tens/pass@1", "eval/set/held/pass@1"]
    else:
        assert command(flags("--eval_dataset", "held.jsonl", *steps, env="tens.py:Tens")) == 0
        own = ["rollout/pass@1", "eval/pass@1", "rollout/pass@4"]
    before, line = read_metrics(place / "out")
    assert {key: (before | line)[key] for key in own} == dict.fromkeys(own, 1.0)
    for key in ("pass@1", "pass@4"):
        assert 0.0 < line[f"rollout/{key}"] <= 1.0
    assert 0.5 <= line["eval/pass@1"] <= 1.0


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--eval_dataset", "tasks.jsonl"], "--eval_dataset: expected ENV=DATA with one of Letters, Turns, own"),
        (["--eval_dataset", "Letters"], "Letters, Turns, own, got 'Letters', an environment. Write Letters=DATA."),
        (["--eval_dataset", "Letters=nope.jsonl"], "nope.jsonl: expected a file"),
        (
            [
                "--eval_dataset",
                "Letters=tasks.jsonl",
                "Turns=env.jsonl",
                "--eval_steps",
                1,
                "--early_stop",
                "set/Letters/x:2",
            ],
            "--early_stop: expected a number of one of the sets tasks, env, got 'set/Letters/x'.",
        ),
        (
            ["--eval_dataset", "Letters=tasks.jsonl", "--eval_steps", 1, "--early_stop", "set/tasks/score:2"],
            "--early_stop: expected no `set/` with one set, got 'set/tasks/score'.",
        ),
        (
            ["--eval_dataset", "Letters=other.jsonl"],
            "environment Letters: other.jsonl, line 1: expected key 'prompt', got keys ['question']. Name its columns "
            "as those of the training's data.",
        ),
        (["--data", "tasks.jsonl"], "--data: expected one --env with it"),
        (["--curriculum", "spraed"], "--curriculum: expected spread or FILE.py:name, got 'spraed'"),
        (["--curriculum", "mine.py:mine"], "mine.py:2: expected weights of environments for --curriculum, got NameErr"),
    ],
)
def test_what_does_not_fit_a_mixture_is_refused_before_anything_is_written(place, capfd, more, expected):
    (place / "env.jsonl").write_bytes((place / "tasks.jsonl").read_bytes())
    (place / "other.jsonl").write_text('{"question": "ok"}\n')
    (place / "mine.py").write_text("def mine(environments):\n    return wieghts\n")
    assert command(mixed(*more)) == 2
    assert expected in capfd.readouterr().err
    assert not (place / "out").exists()


def test_a_training_needs_a_weight_above_0(place, capfd):
    (place / "mix.yaml").write_text('- {env: "env.py:Letters", data: tasks.jsonl, weight: 0}')
    assert command(mixed()) == 2
    assert "--env: expected a weight above 0, got none. Raise a weight." in capfd.readouterr().err


def test_a_curriculum_needs_several_environments(place, capfd):
    assert command(flags("--curriculum", "spread")) == 2
    assert "--curriculum: expected several --env" in capfd.readouterr().err
