"""`agentenv launch verl`: a shell script whose settings are the flags; tests/peers has verl read them."""

import shlex

import pytest
import yaml

from agentenv.cli.main import main

NEEDED = ["--env", "math_retry", "--data", "word_problems_train", "--model", "some/model"]


def printed(capsys, *flags):
    assert main(["launch", "verl", *NEEDED, *flags]) == 0
    return capsys.readouterr().out


def loops_of(script):
    return yaml.safe_load(script.split("agent_loops.yaml <<'END'\n")[1].split("\nEND\n")[0])


def settings_of(script):
    words = shlex.split(script.partition("main_ppo")[2].replace("\\\n", " "))
    return dict(word.split("=", 1) for word in words)


def test_every_flag_is_in_the_script(capsys):
    script = printed(
        capsys, "--env_kwargs", '{"max_attempts": 2}', "--max_turns", "3", "--max_tokens", "60", "--n", "4",
        "--max_prompt_length", "300", "--max_response_length", "200", "--batch_size", "12", "--learning_rate", "0.5",
        "--temperature", "0.75", "--max_steps", "7", "--seed", "9", "--out", "here", "--num_gpus", "2",
        "--engine", "sglang",
    )  # fmt: skip
    assert loops_of(script) == [
        {
            "name": "agentenv", "_target_": "agentenv.interop.verl.agent_loop.EnvAgentLoop", "env": "math_retry",
            "env_kwargs": {"max_attempts": 2}, "limits": {"max_turns": 3}, "max_tokens": 60,
        }
    ]  # fmt: skip
    settings = settings_of(script)
    rollout = {key.rpartition(".")[2]: value for key, value in settings.items() if ".rollout." in key}
    assert (rollout["name"], rollout["n"], rollout["temperature"]) == ("sglang", "4", "0.75")
    assert rollout["agent_loop_config_path"] == "here/agent_loops.yaml"
    assert settings["data.train_files"] == "here/train.parquet"
    assert (settings["data.max_prompt_length"], settings["data.max_response_length"]) == ("300", "200")
    assert (settings["data.train_batch_size"], settings["data.seed"]) == ("12", "9")
    assert settings["actor_rollout_ref.actor.optim.lr"] == "0.5"
    assert settings["actor_rollout_ref.model.path"] == "some/model"
    assert (settings["trainer.total_training_steps"], settings["trainer.n_gpus_per_node"]) == ("7", "2")
    assert "python - word_problems_train here/train.parquet" in script


def test_text_that_hydra_or_the_shell_would_split_is_quoted(capsys):
    script = printed(capsys, "--out", "it's here")
    assert settings_of(script)["trainer.default_local_dir"] == r"'it\'s here'"
    assert "mkdir -p 'it'\"'\"'s here'" in script


@pytest.mark.parametrize("missing", ["--env", "--model"])
def test_a_missing_flag_is_refused(capsys, missing):
    at = NEEDED.index(missing)
    assert main(["launch", "verl", *NEEDED[:at], *NEEDED[at + 2 :]]) == 2
    assert missing in capsys.readouterr().err
