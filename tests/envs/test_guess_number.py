"""guess_number: what a guess is worth, what is said after it, and that halving is what finds every number."""

import json
import math
from pathlib import Path

import pytest

from agentenv.engines.models import load_tokenizer
from agentenv.errors import ConfigError, DataError
from agentenv_envs.guess_number import GuessNumber
from agentenv_envs.guess_number.env import hint_text, invalid_text, rules_text
from examples.make.untrained_model import make_model, make_tokenizer

ROOT = Path(__file__).parents[2]
PROMPT = [{"role": "user", "content": "Guess my number."}]


async def guesses(number, *actions, **options):
    """The results of one instance's guesses, up to the last."""
    env, results = GuessNumber(**options), []
    for action in actions:
        results.append(await env.step({"action_text": str(action), "label": number}))
        if results[-1].terminated:
            break
    return results


def halving(number, low=1, high=15, most=4):
    """The guesses of one who halves what is left."""
    made = []
    while len(made) < most and (not made or made[-1] != number):
        made.append((low + high) // 2)
        low, high = (made[-1] + 1, high) if made[-1] < number else (low, made[-1] - 1)
    return made


# --- the game -----------------------------------------------------------------------------------------------------


async def test_each_wrong_guess_is_answered_with_larger_or_smaller():
    results = await guesses("11", 8, 12, 10, 11)
    said = [result.observation and result.observation[0]["content"] for result in results]
    assert said == ["It is larger.", "It is smaller.", "It is larger.", ""]
    assert [result.reward for result in results] == [0.0, 0.0, 0.0, 1.0]
    assert [result.score for result in results] == [0.0, 0.0, 0.0, 1.0]
    assert [result.terminated for result in results] == [False, False, False, True]


@pytest.mark.parametrize("number", range(1, 16))
async def test_halving_finds_every_number_within_the_guesses_of_the_default(number):
    results = await guesses(number, *halving(number))
    assert results[-1].score == 1.0
    assert all(result.info["possible"] == 1.0 for result in results)


async def test_an_action_without_a_number_in_range_costs_a_guess():
    for action in ("", "no idea", "16", "0", "-3", "99999999999999999999", "3.5", "12a"):
        (result, *_) = await guesses("11", action, 11, invalid_reward=-0.2)
        assert result.observation[0]["content"] == "Say a number from 1 to 15.", action
        assert (result.reward, result.info["valid"], result.info["guesses"]) == (-0.2, 0.0, 1.0)


@pytest.mark.parametrize(
    "action", ["11", " 11\n", "I say 11.", "Not 5, but 11!", "**11**", r"\boxed{11}", "from 1-11", "3.5 or 11"]
)
async def test_the_last_whole_number_of_an_action_is_the_guess(action):
    assert (await guesses("11", action))[-1].score == 1.0


# --- rewards ------------------------------------------------------------------------------------------------------


async def test_information_is_paid_as_it_is_gained_and_sums_to_its_weight_when_the_number_is_known():
    results = await guesses(11, 8, 12, 10, 11, information_reward=2.0, correct_reward=0.5)
    shares = [math.log2(15 / 7), math.log2(7 / 3), math.log2(3), 0.0]
    wanted = [2.0 * share / math.log2(15) for share in shares]
    wanted[-1] += 0.5
    assert [result.reward for result in results] == pytest.approx(wanted)
    assert [result.info["bits"] for result in results] == pytest.approx(shares)


# --- the number ---------------------------------------------------------------------------------------------------


async def test_without_a_label_the_number_comes_from_the_seed_and_stays():
    async def found(seed):
        env = GuessNumber(max_guesses=15)
        states = [await env.step({"action_text": str(n), "label": None, "seed": seed}) for n in range(1, 16)]
        return [state.score for state in states].index(1.0)

    numbers = [await found(seed) for seed in range(40)]
    assert numbers == [await found(seed) for seed in range(40)]
    assert len(set(numbers)) > 8


@pytest.mark.parametrize("label", ["0", "16", "eleven", "", 2.5j])
async def test_a_label_that_is_not_a_number_in_range_is_the_datas_error(label):
    with pytest.raises(DataError, match="label: expected a whole number from 1 to 15"):
        await GuessNumber().reset({"observation": PROMPT, "label": label})


@pytest.mark.parametrize(
    ("options", "named"),
    [({"low": 5, "high": 5}, "high"), ({"max_guesses": 0}, "max_guesses"), ({"low": "1"}, "low"),
     ({"high": True}, "high"), ({"max_guesses": 2.5}, "max_guesses")],
)  # fmt: skip
def test_a_game_that_makes_no_sense_is_refused(options, named):
    with pytest.raises(ConfigError, match=rf"GuessNumber\.{named}: expected"):
        GuessNumber(**options)


def test_the_data_has_every_number_of_the_default_once_and_reveals_none():
    rows = [json.loads(line) for line in GuessNumber.datasets["guess_number"].read_text().splitlines()]
    assert [row["label"] for row in rows] == [str(number) for number in range(1, 16)]
    assert {row["prompt"] for row in rows} == {"Guess my number."}


# --- the prompt ---------------------------------------------------------------------------------------------------


async def test_the_rules_go_under_the_last_user_message_and_the_task_is_not_changed():
    states = await GuessNumber(high=31, max_guesses=5).reset({"observation": PROMPT, "label": "4"})
    rules = "It is a whole number from 1 to 31. You have 5 guesses. Say one number."
    assert states["observation"] == [{"role": "user", "content": f"Guess my number.\n{rules}"}]
    assert PROMPT[0]["content"] == "Guess my number."
    assert "You have 1 guess." in rules_text(1, 15, 1)


# --- as others see it ---------------------------------------------------------------------------------------------


def test_the_untrained_policys_tokenizer_has_one_token_per_word_and_number(tmp_path):
    make_tokenizer(15).save_pretrained(tmp_path)
    model = make_model(make_tokenizer(15))
    model.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert [len(tokenizer.encode(str(number))) for number in range(1, 16)] == [1] * 15
    said = [rules_text(1, 15, 4), hint_text(1, 2), hint_text(2, 1), invalid_text(1, 15)]
    assert [tokenizer.decode(tokenizer.encode(text)) for text in said] == said
    assert [len(tokenizer.encode(hint)) for hint in (hint_text(1, 2), hint_text(2, 1))] == [3, 3]
    assert len({tokenizer.encode(text)[-1] for text in ("12", " 12", "from 12")}) == 1
    assert model.config.vocab_size == len(tokenizer)
