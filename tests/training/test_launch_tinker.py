"""`agentenv launch tinker`: a script whose arguments are the flags; tests/peers has tinker-cookbook read one."""

import ast

from agentenv.cli.main import main
from tests.training.test_launch_trl import arguments

NEEDED = ["--env", "math_retry", "--data", "word_problems_train", "--model", "some/model"]


def printed(capsys, *flags):
    assert main(["launch", "tinker", *NEEDED, *flags]) == 0
    return capsys.readouterr().out


def test_every_flag_is_an_argument_of_the_script(capsys):
    script = printed(
        capsys, "--env_kwargs", '{"max_attempts": 2}', "--max_length", "300", "--max_turns", "3", "--max_tokens", "60",
        "--n", "4", "--batch_size", "12", "--learning_rate", "0.5", "--temperature", "0.75", "--lora_rank", "16",
        "--max_steps", "7", "--seed", "9", "--out", "it's {here}", "--base_url", "http://127.0.0.1:8000",
    )  # fmt: skip
    where, options = arguments(script, "EnvDatasetBuilder")
    assert where == ["math_retry", "word_problems_train", "some/model"]
    assert options == {"env_kwargs": {"max_attempts": 2}, "group_size": 4, "batch_size": 12, "seed": 9}
    assert arguments(script, "Limits")[1] == {"max_length": 300, "max_turns": 3}
    (config,) = [node for node in ast.walk(ast.parse(script)) if ast.unparse(node).startswith("train.Config(")][-1:]
    given = {each.arg: ast.literal_eval(each.value) for each in config.keywords if not isinstance(each.value, ast.Call)}
    assert given == {
        "recipe_name": "agentenv", "model_name": "some/model", "max_tokens": 60, "temperature": 0.75,
        "learning_rate": 0.5, "lora_rank": 16, "max_steps": 7, "eval_every": 0, "base_url": "http://127.0.0.1:8000",
        "log_path": "it's {here}",
    }  # fmt: skip


def test_an_action_may_take_the_whole_episode_if_it_has_no_limit_of_its_own(capsys):
    assert "max_tokens=300," in printed(capsys, "--max_length", "300")
