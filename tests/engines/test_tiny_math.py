"""The policy that ships with the package: its files, its tokenizer, its answers, and the script that made it."""

import importlib.util
import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from agentenv_envs.math_retry.env import feedback_text, question_text
from examples.make.word_problems import read_questions

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "agentenv" / "_assets" / "tiny-math"
SCRIPT = ROOT / "examples" / "train_tiny_math.py"
CONVERSATION = [
    {"role": "user", "content": question_text("Ann has 27 pens. Ann buys 15 more. How many pens does Ann have now?")},
    {"role": "assistant", "content": "27 + 15 = 52\n#### 52"},
    {"role": "user", "content": feedback_text("wrong", "52", 2)},
]
RENDERED = (
    "<|im_start|>user\nAnn has 27 pens. Ann buys 15 more. How many pens does Ann have now?\n"
    "Give the final answer after ####.<|im_end|>\n"
    "<|im_start|>assistant\n27 + 15 = 52\n#### 52<|im_end|>\n"
    "<|im_start|>user\nYour answer 52 is not correct. Check each step and try again. 2 attempts left.<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_tiny_math", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_tiny_math"] = module
    spec.loader.exec_module(module)
    return module


TOKENIZER = AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL).eval()


def answer(model, messages, max_new_tokens):
    """The ids of a greedy attempt."""
    inputs = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids_BT = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
    return ids_BT[0, inputs["input_ids"].shape[1] :].tolist()


def test_the_weights_are_small_and_bfloat16():
    path = MODEL / "model.safetensors"
    assert path.stat().st_size <= 4 * 2**20
    with safe_open(path, "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118


def test_no_sampling_setting_is_hidden_in_the_generation_config():
    generation = json.loads((MODEL / "generation_config.json").read_text())
    assert set(generation) == {"eos_token_id", "pad_token_id", "transformers_version"}


# ---- the tokenizer


@pytest.mark.long
@given(st.text())
def test_any_text_round_trips_but_for_its_unicode_normal_form(text):
    text = unicodedata.normalize("NFC", text)  # Qwen2's tokenizer does the same
    ids = TOKENIZER.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert TOKENIZER.decode(ids, clean_up_tokenization_spaces=False) == text


def test_the_template_is_plain_chatml():
    assert TOKENIZER.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True) == RENDERED


def test_the_automatic_tokenizer_splits_as_the_file_says():
    """AutoTokenizer may put a model family's own splitting in place of the file's, which ruins later attempts."""
    from_file = PreTrainedTokenizerFast(tokenizer_file=str(MODEL / "tokenizer.json"))
    assert TOKENIZER.encode(RENDERED) == from_file.encode(RENDERED)
    assert TOKENIZER.tokenize("27 + 15") == ["2", "7", "\u0120+", "\u0120", "1", "5"]


# ---- the policy


def test_an_easy_problem_is_answered_and_the_attempt_stops(model):
    question = "Ann has 20 pens. Ann buys 15 more. How many pens does Ann have now?"
    ids = answer(model, [{"role": "user", "content": question_text(question)}], 64)
    assert ids[-1] == TOKENIZER.eos_token_id
    assert TOKENIZER.decode(ids[:-1]) == "20 + 15 = 35\n#### 35"


@pytest.mark.long
def test_after_feedback_the_attempt_is_worked_by_columns(model):
    ids = answer(model, CONVERSATION, 128)
    assert ids[-1] == TOKENIZER.eos_token_id
    assert TOKENIZER.decode(ids[:-1]) == "27 + 15: ones 7 + 5 = 12, tens 2 + 1 + 1 = 4, so 42.\n#### 42"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_accuracies_on_the_shipped_tasks(script):
    figures = script.measure(MODEL, 1, 1)
    assert 0.3 <= figures["first"] <= 0.8
    assert figures["after feedback"] >= figures["first"]
    assert figures["after feedback"] >= figures["control"] + 0.15
    assert figures["first tokens"] <= 64
    assert figures["after feedback tokens"] <= 128


# ---- the script


def test_training_keeps_the_shipped_tasks_out(script):
    args = script.Args(out=Path("unused"), train_steps=20)
    problems = script.training_problems(args)
    assert len(problems) > args.train_steps * args.batch_size * 0.7
    assert read_questions().isdisjoint(problem.question for problem in problems)


def train_briefly(out):
    """Runs the script for three steps of a very small model; returns what it prints."""
    flags = ["--train-steps", "3", "--batch-size", "8", "--hidden-size", "32", "--num-layers", "1"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "envs")])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}  # sums of one order, whatever runs beside it
    command = [sys.executable, str(SCRIPT), "--out", str(out), "--eval-samples", "0", *flags]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    return done.stdout


@pytest.mark.long
def test_the_script_writes_a_model_and_equal_seeds_give_equal_bytes(tmp_path):
    printed = train_briefly(tmp_path / "a")
    train_briefly(tmp_path / "b")
    assert "step 2 loss" in printed
    first, second = ({p.name: p.read_bytes() for p in sorted((tmp_path / name).iterdir())} for name in "ab")
    assert first == second
    assert set(first) == {path.name for path in MODEL.iterdir()} - {"README.md"}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "a").num_parameters() < 100_000
