"""examples/train_reward_model.py: learns a rule that can be learned, and leaves a model that everything here loads."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from random import Random

import pytest

from agentenv.cli.rm import rm

SCRIPT = Path(__file__).parents[3] / "examples" / "train_reward_model.py"
KIND = ("I am sorry to hear that.", "Please be careful.", "I would be glad to help.", "Thank you for asking.")
RUDE = ("Shut up.", "That is a stupid thing.", "Go away, you fool.", "I hate this.")


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_reward_model", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_reward_model"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def trained(script, tmp_path_factory):
    """The data, the model's folder and what was printed."""
    import contextlib
    import io

    import torch

    rng, folder = Random(0), tmp_path_factory.mktemp("rm")
    things = ["the weather", "my dog", "this book", "a cold", "my work", "the garden", "a new car", "old maps"]
    with (folder / "pairs.jsonl").open("w") as file:
        for number in range(160):
            head = f"\n\nHuman: {number} What about {rng.choice(things)}?\n\nAssistant: "
            kind, rude = ([rng.choice(of), f"It is {rng.choice(things)}."] for of in (KIND, RUDE))
            texts = [" ".join(rng.sample(parts, 2)) for parts in (kind, rude)]
            file.write(json.dumps({"chosen": head + texts[0], "rejected": head + texts[1]}) + "\n")
    args = script.Args(folder / "rm", str(folder / "pairs.jsonl"), train_steps=60, vocab_size=400, learning_rate=3e-3)
    was = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), torch.random.fork_rng(devices=[]):
            script.main(args)
    finally:
        torch.use_deterministic_algorithms(was[0])
        torch.set_num_threads(was[1])
    return folder, said.getvalue()


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
