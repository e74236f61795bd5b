"""Files of flags: what they hold is checked like a command line, and a run can be repeated from its own."""

import json
from functools import partial

import pytest
import yaml

from agentenv.cli.flags import parse
from agentenv.cli.main import main
from agentenv.cli.train import configured
from agentenv.errors import ConfigError
from agentenv.runs.config import RunConfig
from agentenv.runs.config_file import read_flags, stored_config
from agentenv.runs.records.lines import SCHEMA_VERSION
from agentenv.training.config import TrainConfig
from tests.drivers import command


@pytest.fixture
def write(tmp_path):
    def written(name, text):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return written


def run_flags(*args):
    return parse(RunConfig, "run", [str(arg) for arg in args])


FILES = {
    "a.yaml": "env: math_retry\nn: 4\ntemperature: 1e-1\njson: true\nstop: [a, b]\nenv_kwargs: {max_attempts: 1}\n",
    "a.toml": 'env = "math_retry"\nn = 4\ntemperature = 0.1\njson = true\nstop = ["a", "b"]\n'
    "env_kwargs = {max_attempts = 1}\n",
    "a.json": '{"env": "math_retry", "n": 4, "temperature": 0.1, "json": true, "stop": ["a", "b"], '
    '"env_kwargs": {"max_attempts": 1}}',
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_any_form_says_what_the_flags_say(name, write):
    flags = ["--env", "math_retry", "--n", "4", "--temperature", "0.1", "--json", "--stop", "a", "b"]
    expected = run_flags(*flags, "--env_kwargs", '{"max_attempts": 1}')
    assert run_flags("--config", write(name, FILES[name])) == expected
    assert run_flags(f"--config={write(name, FILES[name])}") == expected


def test_flags_of_the_command_line_override_those_of_the_file_by_any_name(write):
    path = write("a.yaml", "env: math_retry\nn: 4\njson: true\nlimit: 3\ntemperature: 0.5\n")
    made = run_flags("--n_samples_per_prompt", 2, "--no_json", "--config", path, "--limit", "None")
    assert (made.n, made.output.json, made.limit, made.sampling.temperature) == (2, False, None, 0.5)


def test_other_names_of_flags_are_read(write):
    made = configured(["--config", write("a.yaml", "env: e\npretrain: m\nactor.adam.lr: 1e-4\nmax-new-tokens: 9\n")])
    assert (made.model, made.actor_learning_rate, made.max_tokens) == ("m", 1e-4, 9)


def test_values_that_look_like_flags_are_values(write):
    made = run_flags("--config", write("a.yaml", "env: e\nstop: ['---']\nmodel: --x\nseed: null\n"))
    assert (made.sampling.stop, made.model, made.sampling.seed) == (("---",), "--x", None)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "env: e\ntempratur: 1\n", "got the key 'tempratur'. Did you mean 'temperature'?"),
        ("a.yaml", "env: e\nno_json: true\n", "a.yaml: expected flags, got the key 'no_json'. Write json: false."),
        ("a.yaml", "env: e\nn: four\n", "a.yaml: --n: expected an integer, got 'four'."),
        ("a.yaml", "env: e\njson: 'yes'\n", "a.yaml: expected true or false for json, got 'yes'."),
        ("a.yaml", "env: e\nmodel: a\npretrain: b\n", "a.yaml: expected model once, got it under two names."),
        ("a.yaml", "env: e\nn: [1, 2]\n", "a.yaml: --n: expected one value, got [1, 2]. Write one."),
        ("a.yaml", "env: e\nn: 2\nn: 3\n", "a.yaml: expected n once, got it twice. Leave one out."),
        ("a.yaml", "env: e\nenv_kwargs: {a: 2, a: 3}\n", "a.yaml: expected a once, got it twice. Leave one out."),
        ("a.json", '{"env": "e", "n": 2, "n": 3}', "a.json: expected n once, got it twice. Leave one out."),
        ("a.yaml", "n: 0\nenv: e\n", "a.yaml: --n: expected an integer >= 1, got 0."),
        ("a.yaml", "- env\n", "a.yaml: expected flags and their values, got ['env']. Write FLAG: VALUE."),
        ("a.yaml", "env: [\n", "a.yaml: expected YAML, got an error:"),
        ("a.toml", "env = \n", "a.toml: expected TOML, got an error:"),
        ("a.json", "{", "a.json: expected JSON, got an error:"),
        ("a.txt", "env: e\n", "--config: expected a .yaml, .toml or .json file, got"),
    ],
)
def test_a_file_that_is_wrong_is_named_with_its_flag(name, text, said, write, capsys):
    assert main(["run", "--config", write(name, text)]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert shown.count("\n") == 1


def test_a_file_that_is_not_there_and_a_flag_without_a_file_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^--config: expected a file to read, got .*No such file"):
        run_flags("--config", tmp_path / "a.yaml")
    with pytest.raises(ConfigError, match=r"^--config: expected a file, got 'none'"):
        run_flags("--config", "--env", "e")
    with pytest.raises(ConfigError, match=r"^--config: expected it once, got it twice"):
        run_flags("--config", "a.yaml", "--config", "b.yaml")


@pytest.mark.long
def test_a_run_is_repeated_from_its_own_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--env", "guess_number", "--engine", "scripted", "--limit", 2, "--n", 2, "--max_tokens", 4]
    assert command(["run", *flags, "--progress", "none", "--max_error_share", 1, "--out", "a"]) == 0
    assert command(["run", "--config", "a/config.json", "--out", "b"]) == 0
    first, second = (json.loads((tmp_path / out / "config.json").read_text())["config"]["flags"] for out in "ab")
    assert second == first | {"out": "b"}
    assert {"out", "resume"}.isdisjoint(dict(read_flags(RunConfig, "a/config.json")))


# --- agentenv config --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "args", "config"),
    [
        (
            "run",
            ["--env", "math_retry", "--stop", "a", "--env_kwargs", '{"a": 1}', "--no_apply_chat_template"],
            RunConfig,
        ),
        ("train", ["--env", "e", "--no_ray", "--no_advantage_std_norm", "--adam_betas", "0.8", "0.9"], TrainConfig),
        ("train", ["--env", "e", "--lora_rank", "4", "--target_modules", "a", "b"], TrainConfig),
    ],
)
def test_what_is_printed_is_a_file_that_says_the_same(name, args, config, write, capsys):
    assert main(["config", name, *args]) == 0
    text = capsys.readouterr().out
    path = write("printed.yaml", text)
    made = configured(args) if name == "train" else parse(config, name, args)
    again = configured(["--config", path]) if name == "train" else parse(config, name, ["--config", path])
    assert again == made
    assert yaml.safe_load(text) == json.loads(json.dumps(made.to_dict()))


def test_a_printed_flag_has_its_help_as_a_comment_and_no_key_of_a_service(capsys):
    assert main(["config", "train", "--env", "e", "--use_wandb", "secret"]) == 0
    text = capsys.readouterr().out
    assert "# Episodes per prompt.\nn: 8\n" in text
    assert "secret" not in text


def test_config_says_what_it_prints_and_refuses_other_commands(capsys):
    assert main(["config"]) == 0
    assert "Print the flags of `agentenv run`." in capsys.readouterr().out
    assert main(["config", "rn"]) == 2
    assert "Did you mean 'run'?" in capsys.readouterr().err


def test_the_config_of_another_command_is_told_as_such(write, capsys):
    stored = json.dumps({"config": {"flags": {"env": "e", "advantage_estimator": "gae", "rollout_batch_size": 4}}})
    assert command(["run", "--config", write("config.json", stored)]) == 2
    error = capsys.readouterr().err
    assert "expected the config.json of `agentenv run`, got that of `agentenv train`. Use that command" in error


def test_flags_of_an_older_config_json_are_told_by_name(write, capsys):
    stored = json.dumps({"config": {"flags": {"env": "e", "bygone": 1, "outdated": 2}}})
    assert command(["run", "--config", write("config.json", stored)]) == 2
    assert "config.json: expected flags, got the key 'bygone'" in capsys.readouterr().err


# --- --resume ---------------------------------------------------------------------------------------------------------

CHAT = {"engine": "chat", "base_url": "http://server/v1", "model": "big"}


@pytest.mark.parametrize(
    ("command", "config", "started", "flag", "value"),
    [
        ("run", RunConfig, CHAT, "prices", "p.json"),
        ("run", RunConfig, CHAT, "engine", "chat"),
        ("run", RunConfig, {"use_wandb": "True"}, "wandb_run_name", "again"),
        ("train", TrainConfig, {"group_reward": "pairwise"}, "group_timeout_s", 30.0),
    ],
    ids=["prices", "engine", "wandb_run_name", "group_timeout_s"],
)
def test_a_flag_beside_resume_may_need_a_flag_of_the_run(tmp_path, command, config, started, flag, value):
    flags = config.from_flags(env="math_retry", **started).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({"schema_version": SCHEMA_VERSION, "config": {"flags": flags}}))
    stored = partial(stored_config, config, command)
    resumed = parse(config, command, ["--resume", "--out", str(tmp_path), f"--{flag}", str(value)], stored)
    assert resumed.to_dict() == flags | {"out": str(tmp_path), "resume": True, flag: value}
