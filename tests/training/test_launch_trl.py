"""`agentenv launch trl`: a script whose arguments are the flags; tests/peers runs one."""

import ast

import pytest

from agentenv.cli.main import main

NEEDED = ["--env", "math_retry", "--data", "word_problems_train", "--model", "some/model"]


def printed(capsys, *flags):
    assert main(["launch", "trl", *NEEDED, *flags]) == 0
    return capsys.readouterr().out


def arguments(script, name):
    """The arguments of a call in the script."""
    calls = [node for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Call)]
    (call,) = [call for call in calls if getattr(call.func, "id", "") == name]
    positional = [value.value for value in call.args if isinstance(value, ast.Constant)]
    return positional, {
        each.arg: ast.literal_eval(each.value)
        for each in call.keywords
        if not isinstance(each.value, ast.Call | ast.Name)
    }


def test_every_flag_is_an_argument_of_the_script(capsys):
    script = printed(
        capsys, "--env_kwargs", '{"max_attempts": 2}', "--max_length", "300", "--max_turns", "3", "--max_tokens", "60",
        "--n", "4", "--batch_size", "12", "--learning_rate", "0.5", "--temperature", "0.75", "--kl_coef", "0.25",
        "--max_steps", "7", "--seed", "9", "--out", "here", "--use_cpu",
    )  # fmt: skip
    assert arguments(script, "read_tasks")[0] == ["word_problems_train"]
    assert arguments(script, "GRPOTrainer")[1]["model"] == "some/model"
    where, options = arguments(script, "EnvRollout")
    assert (where, options) == (["math_retry"], {"env_kwargs": {"max_attempts": 2}, "max_tokens": 60})
    assert arguments(script, "Limits")[1] == {"max_length": 300, "max_turns": 3}
    where, options = arguments(script, "GRPOConfig")
    assert where == ["here"]
    assert options == {
        "num_generations": 4, "per_device_train_batch_size": 12, "learning_rate": 0.5, "temperature": 0.75,
        "beta": 0.25, "max_steps": 7, "seed": 9, "logging_steps": 1, "report_to": "none", "use_vllm": False,
        "use_cpu": True, "bf16": False,
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_an_engine_is_a_mode_of_trls_vllm(capsys, mode):
    options = arguments(printed(capsys, "--engine", f"vllm_{mode}"), "GRPOConfig")[1]
    assert (options["use_vllm"], options["vllm_mode"]) == (True, mode)
    assert (options["use_cpu"], options["bf16"]) == (False, True)


def test_text_with_quotes_stays_text(capsys):
    script = printed(capsys, "--out", "it's {here}")
    assert arguments(script, "GRPOConfig")[0] == ["it's {here}"]


def test_a_missing_environment_is_refused(capsys):
    assert main(["launch", "trl", "--data", "x", "--model", "m"]) == 2
    assert "--env" in capsys.readouterr().err
