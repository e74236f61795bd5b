"""examples/train_reward_model.py: learns a rule that can be learned, and leaves a model that everything here loads."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from agentenv.cli.rm import rm

ROOT = Path(__file__).parents[3]
KIND = ("I am sorry to hear that.", "Please be careful.", "I would be glad to help.", "Thank you for asking.")
RUDE = ("Shut up.", "That is a stupid thing.", "Go away, you fool.", "I hate this.")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The data, the model's folder and what was printed."""
    rng, folder = Random(0), tmp_path_factory.mktemp("rm")
    things = ["the weather", "my dog", "this book", "a cold", "my work", "the garden", "a new car", "old maps"]
    with (folder / "pairs.jsonl").open("w") as file:
        for number in range(160):
            head = f"\n\nHuman: {number} What about {rng.choice(things)}?\n\nAssistant: "
            kind, rude = ([rng.choice(of), f"It is {rng.choice(things)}."] for of in (KIND, RUDE))
            texts = [" ".join(rng.sample(parts, 2)) for parts in (kind, rude)]
            file.write(json.dumps({"chosen": head + texts[0], "rejected": head + texts[1]}) + "\n")
    flags = ["--out", folder / "rm", "--data", folder / "pairs.jsonl", "--train_steps", "60", "--vocab_size", "400"]
    command = [sys.executable, ROOT / "examples/train_reward_model.py", *flags, "--learning_rate", "3e-3"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "envs")])}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=True)
    return folder, ended.stdout


@pytest.mark.long
def test_a_rule_that_can_be_learned_is_learned_and_reported_with_its_interval(trained):
    *_, held_out = trained[1].splitlines()
    found = re.fullmatch(
        r"held out: accuracy (\S+) \((\S+) to (\S+)\) of (\d+) pairs; length alone (\S+)", held_out
    )  # fmt: skip
    accuracy, low, high, count, length = map(float, found.groups())
    assert accuracy >= 0.9
    assert low <= accuracy <= high
    assert 50 < count < 110
    assert length < 0.9


@pytest.mark.long
def test_its_saved_model_passes_the_check_and_is_evaluated(trained, capsys):
    folder = trained[0]
    assert rm(["check", str(folder / "rm")]) == 0
    shown = capsys.readouterr().out
    assert not [line for line in shown.splitlines() if not line.startswith("✓")]
    assert rm(["eval", "--data", str(folder / "pairs.jsonl"), "--rm", str(folder / "rm"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total"]["score"] >= 0.9
