"""`agentenv launch skyrl`: a script whose settings are the flags; tests/peers has SkyRL take them."""

import ast

from agentenv.cli.main import main
from tests.training.test_launch_trl import arguments

NEEDED = ["--env", "math_retry", "--data", "word_problems_train", "--model", "some/model"]


def printed(capsys, *flags):
    assert main(["launch", "skyrl", *NEEDED, *flags]) == 0
    return capsys.readouterr().out


def settings_of(script):
    (made,) = [node for node in ast.parse(script).body if ast.unparse(node).startswith("SETTINGS = ")]
    return ast.literal_eval(made.value.left)


def test_every_flag_is_in_the_script(capsys):
    script = printed(
        capsys, "--env_kwargs", '{"max_attempts": 2}', "--max_prompt_length", "300", "--max_input_length", "900",
        "--max_turns", "3", "--max_tokens", "60", "--n", "4", "--batch_size", "12", "--learning_rate", "0.5",
        "--temperature", "0.75", "--max_steps", "7", "--seed", "9", "--out", "it's {here}", "--num_gpus", "2",
    )  # fmt: skip
    settings = {name.partition(".")[2]: value for name, value in settings_of(script).items()}
    assert settings.items() >= {
        "policy.model.path": "some/model", "policy.optimizer_config.lr": 0.5, "train_batch_size": 12,
        "policy_mini_batch_size": 12, "max_prompt_length": 300, "max_training_steps": 7, "epochs": 7, "seed": 9,
        "placement.policy_num_gpus_per_node": 2, "inference_engine.num_engines": 2, "n_samples_per_prompt": 4,
        "max_turns": 3, "max_input_length": 900, "sampling_params.max_generate_length": 60,
        "sampling_params.temperature": 0.75, "step_wise_trajectories": True,
    }.items()  # fmt: skip
    (call,) = [node for node in ast.walk(ast.parse(script)) if ast.unparse(node).startswith("EnvGenerator(")][-1:]
    assert ast.literal_eval(call.args[3]) == "math_retry"
    assert ast.literal_eval(call.keywords[0].value) == {"max_attempts": 2}
    assert arguments(script, "read_tasks")[0] == ["word_problems_train"]
    assert """OUT = os.path.abspath("it's {here}")""" in script


def test_an_episode_of_one_turn_has_no_input_beyond_its_prompt(capsys):
    script = printed(capsys, "--max_turns", "1", "--max_prompt_length", "300")
    assert settings_of(script)["generator.max_input_length"] == 300
