"""reasoning_gym: the rows that its command makes, and all 105 datasets through all of it."""

import asyncio
import json
from importlib.util import find_spec

import pytest

from agentenv.core.dataset import read_tasks
from agentenv.errors import ConfigError
from agentenv.rewards.types import Response
from agentenv_envs.reasoning_gym import ReasoningGym, ReasoningGymReward
from agentenv_envs.reasoning_gym.__main__ import main
from agentenv_envs.reasoning_gym.reward import INSTRUCTIONS, oracle, wrapped
from agentenv_envs.reasoning_gym.rows import RowsConfig, dataset_names, make_rows, split_of

pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="pip install 'agentenv-rl[reasoning-gym]'")


def made(*names, **settings):
    """Rows of these datasets."""
    return make_rows(dict.fromkeys(names, 1.0), RowsConfig(**settings))


def questions(rows):
    return {json.loads(row["label"])["question"] for row in rows}


@pytest.mark.parametrize("name", ["chain_sum", "n_queens", "coin_flip", "gcd"])
def test_train_and_eval_share_no_question_regardless_of_their_seeds(name):
    train = questions([row for seed in (0, 1, 7) for row in made(name, size=40, seed=seed)])
    evaluated = questions([row for seed in (0, 1, 7) for row in made(name, size=6, seed=seed, split="eval")])
    assert not train & evaluated
    assert len(evaluated) > 6


def test_variations_of_one_arc_puzzle_are_in_one_split():
    variations = [{"question": str(n), "metadata": {"source_dataset": "arc_agi", "task_id": "a"}} for n in range(50)]
    assert len({split_of(item) for item in variations}) == 1
    others = [{"question": str(n), "metadata": {"source_dataset": "gcd"}} for n in range(200)]
    assert {split_of(item) for item in others} == {"train", "eval"}


def test_weights_share_the_rows_and_every_dataset_has_one():
    rows = make_rows({"gcd": 8.0, "lcm": 1.0, "chain_sum": 1.0}, RowsConfig(size=23))
    counts = {name: sum(row["dataset"] == name for row in rows) for name in ("gcd", "lcm", "chain_sum")}
    assert counts == {"gcd": 17, "lcm": 3, "chain_sum": 3}
    assert [row["dataset"] for row in rows] != sorted(row["dataset"] for row in rows)


def test_a_level_is_harder_and_the_settings_go_before_it():
    def longest(**settings):
        return max(len(question) for question in questions(made("chain_sum", size=15, **settings)))

    assert longest(level=0) < longest(level=3)
    assert longest(level=3, config='{"chain_sum": {"min_terms": 2, "max_terms": 2}}') < longest(level=3)
    assert made("acre", size=1, level=2)[0]["level"] == 2  # without a curriculum it stays as it is
    assert made("chain_sum", size=1, level=99)


async def test_the_composite_dataset_makes_items_of_its_parts():
    parts = [{"name": "gcd", "weight": 2.0}, {"name": "lcm", "config": {"min_numbers": 3, "max_numbers": 3}}]
    rows = made("composite", size=8, config=json.dumps({"composite": {"datasets": parts}}))
    assert {row["dataset"] for row in rows} == {"gcd", "lcm"}
    for row in rows:
        answer = wrapped(oracle(json.loads(row["label"])))
        assert (await ReasoningGymReward().grade(Response(answer, row["label"]))).reward == 1.0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--datasets", "syllogism"], "no constant answer solves more than 66%, got syllogism (72%)"),
        (["--datasets", "chain_sun"], "got 'chain_sun'. Did you mean 'chain_sum'? --list shows all."),
        (["--datasets", "gcd,lcm", "--size", "1"], "reasoning_gym.size: expected at least 2"),
        (["--datasets", "gcd", "--config", '{"lcm": {}}'], "reasoning_gym.config: expected among gcd"),
        (["--datasets", "gcd", "--config", '{"gcd": {"min_number": 1}}'], "expected settings of gcd (min_numbers"),
        (["--datasets", "knight_swap", "--level", "0"], "at level 0: min_nodes must be >= 6"),
        (["--datasets", "gcd", "--out", "rows.csv"], "--out: expected a .jsonl file"),
    ],
)
def test_anything_that_cannot_be_made_is_reported_in_one_line(flags, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        main(flags)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["split", "answer"])
def test_a_choice_from_python_is_checked_as_a_flag_is(name):
    with pytest.raises(ConfigError, match=rf"reasoning_gym\.{name}: expected one of .*, got 'x'"):
        make_rows({"chain_sum": 1.0}, RowsConfig(**{name: "x"}))


@pytest.mark.long
def test_the_command_writes_rows_that_can_be_run(tmp_path, capsys):
    out = tmp_path / "rg.jsonl"
    flags = ["--datasets", "gcd,logic,-zebra_puzzles,countdown=2", "--size", "24", "--answer", "boxed"]
    assert main([*flags, "--out", str(out)]) == 0
    said = capsys.readouterr().err
    assert "excluded (one constant answer solves more than 66%): syllogism" in said
    assert "note: one constant answer solves 61% of circuit_logic" in said
    assert "24 rows of 7 datasets, split train" in said
    tasks = read_tasks(str(out))
    assert len(tasks) == 24
    assert all(task.prompt[0]["content"].endswith(INSTRUCTIONS["boxed"]) for task in tasks)
    assert not {"syllogism", "zebra_puzzles"} & {task.metadata["dataset"] for task in tasks}
    assert [path.name for path in tmp_path.iterdir()] == ["rg.jsonl"]


@pytest.mark.slow
async def test_all_105_reward_only_their_gold_answer():
    names = [name for names in dataset_names().values() for name in names]
    rows = made(*names, size=210, seed=5, max_chance=1.0)
    strict, lenient = ReasoningGymReward(), ReasoningGymReward(partial_credit=True)

    async def worth(reward, text, label):
        return (await reward.grade(Response(text, label))).reward

    async def one(row):
        """What is wrong with the grades of a row."""
        label, entry = row["label"], json.loads(row["label"])
        if (right := oracle(entry)) is None:
            return []
        told = entry["answer"] is not None  # else what solves the item is looked for in the text, wherever it is
        more = [f"<answer>blah blah {right}</answer>", f"<answer>{right} blah blah</answer>"] * told
        nothing = ["", right, "<answer></answer>", "<answer>zzz</answer>", f"<think>{wrapped(right)}"]
        wrong = [reward for reward in (strict, lenient) if await worth(reward, wrapped(right), label) != 1.0]
        wrong += [text for text in nothing if await worth(lenient, text, label) != 0.0]
        wrong += [text for text in [*more, *ReasoningGym.hacks.values()] if await worth(strict, text, label) != 0.0]
        return [(row["id"], each) for each in wrong]

    assert [each for found in await asyncio.gather(*map(one, rows)) for each in found] == []
    assert len({row["dataset"] for row in rows}) == 105
