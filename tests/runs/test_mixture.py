"""Mixtures: what `--env` and a file of entries may say, and a run of several environments."""

import json
from pathlib import Path

import pytest

import agentenv
from agentenv import ScriptedEngine, read_trajectories
from agentenv.cli.flags import parse
from agentenv.errors import ConfigError, DataError
from agentenv.runs.config import RunConfig
from agentenv.runs.mixture import MixtureEntry, is_plain, read_entries, source_name
from tests.drivers import command, write_rows

ENVS = '''
from agentenv import AgentInstance, StepResult


class Short(AgentInstance):
    """Ends in its own number of turns; a score of up to 10."""

    max_turns = 2
    score_range = (0.0, 10.0)

    def __init__(self, worth=10.0):
        self.worth = worth

    async def step(self, states):
        return StepResult("Go on.", reward=self.worth, score=self.worth)


class Once(AgentInstance):
    needs_label = False

    async def step(self, states):
        return StepResult(reward=0.0, score=0.0, terminated=True)


class Broken(AgentInstance):
    async def step(self, states):
        raise ValueError("broken")
'''


class ShortContext(ScriptedEngine):
    max_model_len = 512


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "envs.py").write_text(ENVS)
    write_rows(tmp_path / "a.jsonl", [{"prompt": f"a{index}", "label": "x", "id": f"row{index}"} for index in range(3)])
    write_rows(tmp_path / "b.jsonl", [{"question": f"b{index}", "id": f"row{index}"} for index in range(2)])
    (tmp_path / "mix.yaml").write_text(
        "- env: envs.py:Short\n  data: a.jsonl\n  env_kwargs: {worth: 10.0}\n"
        "- env: envs.py:Once\n  name: once\n  weight: 0.5\n  data: b.jsonl\n  prompt_key: question\n  limit: 1\n"
    )
    return tmp_path


def run_mix(*more):
    flags = ["run", "--env", "mix.yaml", "--n", 2, "--max_tokens", 4, "--progress", "none", "--out", "out"]
    return command([*flags, *more])


# --- what the flag says -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "env", "name", "weight"),
    [
        ("math_retry", "math_retry", "math_retry", 1.0),
        ("math_retry:0.5", "math_retry", "math_retry", 0.5),
        ("math_retry:2", "math_retry", "math_retry", 2.0),
        ("math_retry:0", "math_retry", "math_retry", 0.0),  # `run` ignores weights
        ("pkg.module:Attr", "pkg.module:Attr", "Attr", 1.0),
        ("pkg.module:Attr:.25", "pkg.module:Attr", "Attr", 0.25),
        ("folder/env.py", "folder/env.py", "env", 1.0),
        ("folder/env.py:3", "folder/env.py", "env", 3.0),
        ("folder/env.py:Attr2:3.", "folder/env.py:Attr2", "Attr2", 3.0),
        ("pkg:nan", "pkg:nan", "nan", 1.0),  # a name in Python, as every word that begins with a letter
        ('{"env": "tool_use", "max_turns": 4, "name": "t"}', "tool_use", "t", 1.0),
    ],
)
def test_a_number_after_the_last_colon_is_a_weight_and_a_name_is_an_attribute(given, env, name, weight):
    (entry,) = read_entries([given])
    assert (entry.env, entry.name, entry.weight) == (env, name, weight)


@pytest.mark.parametrize("text", ["mix.yaml:2", "folder/mix.yml:0.5", "mix.json:Name", '{"env": "mix.yaml"}'])
def test_a_weight_or_a_name_after_a_file_of_entries_is_refused_before_anything_is_loaded(text):
    with pytest.raises(ConfigError, match=r"expected an environment, got '.*mix.*', a file of entries. Use --env"):
        read_entries([text, "math_retry"])


def test_one_environment_is_no_mixture_and_keeps_its_name():
    assert all(map(is_plain, ([], ["math_retry"], ["a.py:B"], ["p.q:R"])))
    assert not any(map(is_plain, (["a", "b"], ["a:0.5"], ["mix.yaml"], ['{"env": "a"}'])))
    assert [source_name(env) for env in ([], ["x/a.py:B"], ["x/a.py:B", "c:2"], ["mix.yaml"])] == [
        "", "x/a.py:B", "B+c", "mix"
    ]  # fmt: skip


def test_a_file_may_be_yaml_or_json_and_be_joined_by_further_environments(tmp_path):
    entries = ["guess_number", {"env": "tool_use", "name": "tools", "env_kwargs": {"a": [1]}, "weight": 3}]
    (tmp_path / "mix.json").write_text(json.dumps(entries))
    assert read_entries([str(tmp_path / "mix.json"), "math_retry:2"]) == [
        MixtureEntry("guess_number", "guess_number"),
        MixtureEntry("tool_use", "tools", 3, {"a": [1]}),
        MixtureEntry("math_retry", "math_retry", 2.0),
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "expected a list of entries, got None"),
        ("env: a", "expected a list of entries"),
        ("- weight: 1", "entry 1: expected an object with `env`"),
        (
            "- env: a\n- env: b\n  wieght: 2",
            "entry 2: expected a key of an entry, got 'wieght'. Did you mean 'weight'?",
        ),
        ("- env: a\n  max_tokens: 6", "entry 1: expected a key of an entry, got 'max_tokens'. The keys are env, "),
        ("- env: a\n  max_turns: '4'", "entry 1: expected an integer as `max_turns`, got '4'"),
        ("- env: a\n  limit: 1.5", "expected an integer as `limit`, got 1.5"),
        ("- env: a\n  data: [{prompt: q}]", "expected text as `data`, got [{'prompt': 'q'}]. Write rows to a file"),
        ("- env: a\n  limit: true", "expected an integer as `limit`"),
        ("- env: a\n  weight: no", "expected a number as `weight`"),
        ("- env: a\n  weight: -1", "expected a weight >= 0, got -1"),
        ("- env: a\n  weight: .inf", "expected a weight >= 0"),
        ("- env: a\n  env_kwargs: []", "expected an object as `env_kwargs`"),
        ("- env: a\n  name: a/b", "expected a name of letters, digits"),
        ("- env: a.py:B:2", "entry 1: expected an environment, got 'a.py:B:2'. Write its weight as `weight: 2`."),
        ("- env: a\n- env: a", "expected environments of different names, got 'a' 2 times"),
        ("- env: [", "expected a YAML or JSON file"),
    ],
)
def test_a_wrong_file_is_answered_with_the_entry_and_what_to_do(tmp_path, content, expected):
    (tmp_path / "mix.yaml").write_text(content)
    with pytest.raises(ConfigError) as raised:
        read_entries([str(tmp_path / "mix.yaml")])
    assert expected in str(raised.value)


def test_the_flag_may_be_given_several_times_and_in_a_config_file(tmp_path):
    def parsed(*words):
        return parse(RunConfig, "run", words).env

    assert parsed("--env", "a", "--n", "2", "--env=b:0.5", "--env", "c") == ("a", "b:0.5", "c")
    assert parsed("--env", "a", "b:0.5") == ("a", "b:0.5")
    path = tmp_path / "flags.json"
    path.write_text(json.dumps({"env": ["a", {"env": "b", "weight": 2}], "n": 2}))
    assert read_entries(parsed("--config", str(path))) == [MixtureEntry("a", "a"), MixtureEntry("b", "b", 2)]
    assert parsed("--config", str(path), "--env", "c") == ("c",)
    path.write_text(json.dumps({"env": None, "agent_func_path": "a.py"}))
    assert parsed("--config", str(path)) == (), "as config.json has it"


def test_config_json_of_one_environment_is_as_it_was():
    assert RunConfig.from_flags(env="math_retry").to_dict()["env"] == "math_retry"
    assert RunConfig.from_flags(env=None, resume=True).to_dict()["env"] is None


def test_an_entry_in_python_may_hold_paths_and_no_other_objects():
    paths = {"env": Path("e.py"), "data": Path("d.jsonl")}
    assert read_entries(RunConfig.from_flags(env=[paths]).env) == [MixtureEntry("e.py", "e", data="d.jsonl")]
    with pytest.raises(ConfigError, match="--env: expected values that JSON has, got another: "):
        RunConfig.from_flags(env=[{"env": "e", "env_kwargs": {"key": object()}}])


# --- a run ------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_has_all_tasks_of_each_environment_with_its_own_data_arguments_and_limits(place, capsys):
    assert run_mix() == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "Short" in line and "20.000" in line)
    assert "10.000" in row
    episodes = {each.episode_id: each for each in read_trajectories("out")}
    assert set(episodes) == {f"Short/row{i}/{n}" for i in range(3) for n in range(2)} | {"once/row0/0", "once/row0/1"}
    short, once = episodes["Short/row2/1"], episodes["once/row0/1"]
    assert (len(short.turns), short.reward, short.task.env) == (2, 20.0, "Short")
    assert (len(once.turns), once.reward, once.task.prompt[0]["content"]) == (1, 0.0, "b0")
    metrics = json.loads((place / "out/metrics.json").read_text())
    by_env = metrics["environments"]
    keys = ("num_tasks", "pass_score", "num_episodes")
    assert {name: [each[key] for key in keys] for name, each in by_env.items()} == {
        "Short": [3, 10.0, 6], "once": [1, 1.0, 2]
    }  # fmt: skip
    assert {name: (each["reward"]["mean"], each["pass_at_k"]["1"]["mean"]) for name, each in by_env.items()} == {
        "Short": (20.0, 1.0), "once": (0.0, 0.0)
    }  # fmt: skip
    assert metrics["num_tasks"] == 4
    assert metrics["pass_at_k"]["1"]["mean"] == 0.75, "each by the score of its own environment"
    assert metrics["reward"]["mean"] == 15.0
    assert "time" not in by_env["Short"]


@pytest.mark.long
def test_the_run_that_is_read_has_the_metrics_of_the_run_also_if_config_json_is_of_an_earlier_version(place):
    assert run_mix() == 0
    metrics = json.loads((place / "out/metrics.json").read_text())
    found = agentenv.load_run("out").metrics.to_dict()
    assert found | {"time": None} == metrics | {"time": None}
    document = json.loads((place / "out/config.json").read_text())
    assert document["config"].pop("pass_scores") == {"Short": 10.0, "once": None}
    (place / "out/config.json").write_text(json.dumps(document))
    assert agentenv.load_run("out").metrics.num_episodes == 8
    assert run_mix("--resume") == 0


def test_config_json_keeps_what_the_entries_say_so_that_a_flag_sets_the_rest(place):
    how = {"engine": ScriptedEngine(["A"]), "progress": "none"}
    agentenv.rollout([{"env": "envs.py:Short", "data": "a.jsonl", "max_length": 99}, "math_retry"], out="out", **how)
    stored = json.loads((place / "out/config.json").read_text())["config"]["flags"]
    run = agentenv.rollout(stored["env"], max_turns=1, max_length=500, **how)
    assert {(each.task.env, each.max_length, len(each.turns)) for each in run} == {
        ("Short", 99, 1), ("math_retry", 500, 1)
    }  # fmt: skip


@pytest.mark.long
def test_a_mixture_is_resumed_without_its_file_and_refused_if_the_file_changed(place, capsys):
    assert run_mix() == 0
    whole = sorted((each.episode_id, each.reward, list(each.token_ids)) for each in read_trajectories("out"))
    metrics = json.loads((place / "out/metrics.json").read_text())
    lines = (place / "out/trajectories.jsonl").read_bytes().splitlines(keepends=True)
    (place / "out/trajectories.jsonl").write_bytes(b"".join(lines[::2]))
    content = (place / "mix.yaml").read_text()
    (place / "mix.yaml").write_text(content.replace("worth: 10.0", "worth: 3.0"))
    capsys.readouterr()
    assert run_mix("--resume") == 2
    assert "was {'name': 'Short', 'env_kwargs': {'worth': 10.0}}, is now" in capsys.readouterr().err
    (place / "mix.yaml").unlink()
    assert command(["run", "--resume", "--out", "out"]) == 0
    assert "changed on resume" not in capsys.readouterr().err
    assert sorted((each.episode_id, each.reward, list(each.token_ids)) for each in read_trajectories("out")) == whole
    again = json.loads((place / "out/metrics.json").read_text())
    assert again["environments"] == metrics["environments"]
    assert again | {"time": None} == metrics | {"time": None}
    (place / "mix.yaml").write_text(content)
    assert run_mix("--resume") == 0, "and with the same file again"


@pytest.mark.long
def test_failures_are_counted_for_their_environment(place):
    environments = [{"env": "envs.py:Broken", "data": "a.jsonl"}, {"env": "envs.py:Short", "data": "a.jsonl"}]
    run = agentenv.rollout(environments, n=1, max_tokens=4, max_error_share=1.0, progress="none")
    by_env = run.metrics.environments
    assert {name: each.num_env_errors for name, each in by_env.items()} == {"Broken": 3, "Short": 0}
    assert {name: each.num_rewarded for name, each in by_env.items()} == {"Broken": 0, "Short": 3}


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"max_turns": 0}, "environment Short: --max_turns: expected an integer >= 1, got 0"),
        ({"env_kwargs": {"price": 1}}, "environment Short: env_kwargs: expected arguments of Short"),
        (
            {"data": None},
            "environment Short: --data: expected tasks, got none. Add --data FILE.jsonl or a built-in name; write",
        ),
        (
            {"data": "b.jsonl"},
            "environment Short: b.jsonl, line 1: expected key 'prompt', got keys ['question', 'id']. Set `prompt_key` "
            "in its entry to one of them.",
        ),
        ({"env": "envs.py:NoTurns"}, "environment NoTurns: --max_turns: expected an integer >= 1, got 0"),
    ],
)
def test_an_error_of_one_environment_names_it(place, entry, expected):
    (place / "envs.py").write_text(ENVS + "\n\nclass NoTurns(Once):\n    max_turns = 0\n")
    short = {"env": "envs.py:Short", "data": "a.jsonl"} | entry
    short = {key: value for key, value in short.items() if value is not None}
    with pytest.raises((ConfigError, DataError)) as raised:
        agentenv.rollout(["math_retry", short], progress="none")
    assert str(raised.value).startswith(expected)


@pytest.mark.long
def test_a_context_that_is_too_short_names_the_environment_with_the_longest_episodes(place):
    environments = ["math_retry", {"env": "envs.py:Short", "data": "a.jsonl", "max_length": 9999}]
    expected = r"^environment Short: HFEngine: expected max_length <= 2048, .* Lower it; --max_length 2048 takes"
    with pytest.raises(ConfigError, match=expected):
        agentenv.rollout(environments, model="tiny-math", engine="hf", limit=1, progress="none")
    with pytest.raises(ConfigError, match=r"^environment Short: --max_length: expected at most 512, the server's"):
        agentenv.rollout(environments, engine=ShortContext(["A"]), model="tiny-math", limit=1, progress="none")


def test_the_screen_shows_the_data_and_the_limits_of_each_environment(place, capsys):
    cut = json.dumps({"env": "math_retry", "name": "cut", "max_turns": 1, "max_length": 300})
    assert run_mix("--env", "mix.yaml", "math_retry", cut, "--limit", 2) == 0
    shown = " ".join(capsys.readouterr().out.split())  # a line may be wrapped
    assert "data Short a.jsonl, once b.jsonl, math_retry word_problems, cut word_problems: 7 tasks × 2" in shown
    assert "limits max_turns 2 (the environment's, Short), max_length 300 (cut), max_turns 1 (cut)" in shown


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--data", "a.jsonl"], "--data: expected one --env with it, got several"),
        (["--env_kwargs", '{"worth": 1}'], "--env_kwargs: expected one --env with it"),
        (["--env", "mix.yaml", "envs.py:Once"], "--data: expected tasks, got none"),
    ],
)
def test_what_does_not_fit_several_environments_is_refused(place, capsys, more, expected):
    assert run_mix(*more) == 2
    assert expected in capsys.readouterr().err
    assert not (place / "out").exists()


@pytest.mark.parametrize("env", [ShortContext, {"env": ShortContext}])
def test_a_class_among_several_environments_is_told_to_be_named(env):
    with pytest.raises(ConfigError, match=r"^--env: expected text, got <class .*Write a class as FILE.py:Name"):
        agentenv.rollout([env, "math_retry"], progress="none")


def test_rows_in_python_need_one_environment(place):
    with pytest.raises(ConfigError, match=r"expected none with several environments, got rows\. Write them to a file"):
        agentenv.rollout(["mix.yaml"], [{"prompt": "?", "label": "x"}], progress="none")


@pytest.mark.long
def test_environments_of_a_mixture_live_in_processes_of_their_own(place):
    assert run_mix("--env_actors", 1) == 0
    by_env = json.loads((place / "out/metrics.json").read_text())["environments"]
    assert {name: (each["num_rewarded"], each["num_retries"]) for name, each in by_env.items()} == {
        "Short": (6, 0), "once": (2, 0)
    }  # fmt: skip
