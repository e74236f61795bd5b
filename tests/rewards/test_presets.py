"""Reward functions that are ready: the guide's three, without the holes of its own."""

import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from agentenv.errors import ConfigError, ContractError, DataError, InfraError
from agentenv.interop.agent_files import load_reward_func
from agentenv.interop.openrlhf.answers import answers, grade_or_raise
from agentenv.rewards.function import FunctionReward
from agentenv.rewards.models.openrlhf_wire import as_answer, read_rewards
from agentenv.rewards.types import Response

ROOT = Path(__file__).parents[2]
FILES = ROOT / "agent_funcs"
math_reward_func = load_reward_func(FILES / "reward_math.py")
conversation_reward_func = load_reward_func(FILES / "reward_conversation.py").__globals__["conversation_reward_func"]
PROMPT = "<|im_start|>user\nWhat is 6*7?<|im_end|>\n<|im_start|>assistant\n"


def is_an_answer(got, num):
    """Float tensors of one number per query, scores in 0..1, and what OpenRLHF's reader takes."""
    for tensor in (got["rewards"], got["scores"], *got["extra_logs"].values()):
        assert (tensor.dtype, tuple(tensor.shape)) == (torch.float32, (num,))
    assert bool(((got["scores"] >= 0) & (got["scores"] <= 1)).all())
    assert [each.reward for each in read_rewards(got, num, "f")] == got["rewards"].tolist()
    return got


# --- what they share ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "query", "expected"),
    [
        ("Q?", "Q?A<|im_end|>\n", "A"),
        ("Q?", "<s>Q? A</s>", " A"),
        ("Q?", "Q?You ask: Q? I say A", "You ask: Q? I say A"),
        ("", "A", "A"),
        ("Q?<think>\n", "Q?<think>\nSo A</think>B", "<think>So A</think>B"),
    ],
)
def test_the_answer_is_what_follows_the_first_prompt_never_the_last_piece_of_a_split(prompt, query, expected):
    (response,) = answers([query], [prompt], ["label"])
    assert (response.text, response.prompt, response.label) == (expected, prompt, "label")


@pytest.mark.parametrize("lists", [("ab", "ab", ["l", "l"]), ([None], ["a"], ["l"]), (["a"], [b"a"], ["l"])])
def test_input_that_is_not_a_list_of_texts_is_refused(lists):
    with pytest.raises(DataError, match="expected a list of texts"):
        answers(*lists)


def test_no_failure_becomes_a_number():
    with pytest.raises(ContractError, match="scores: expected numbers"):
        as_answer([1.0, 0.0], [1.0, None], {})
    with pytest.raises(ContractError, match="rewards: expected numbers"):
        as_answer([None], [1.0], {})


# --- mathematics ----------------------------------------------------------------------------------------------------


def math_rewards(*cases):
    queries = [PROMPT + answer + "<|im_end|>" for answer, _ in cases]
    got = math_reward_func(queries, [PROMPT] * len(cases), [label for _, label in cases])
    return is_an_answer(got, len(cases))


def test_math_has_the_guides_scale():
    got = math_rewards(("The answer is 42.", "42"), ("#### 42", "#### 42"), (r"\boxed{41}", "42"), ("Who knows?", "42"))
    assert got["rewards"].tolist() == [1.0, 1.0, 0.0, -0.5]
    assert got["scores"].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert got["extra_logs"]["math_accuracy"].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert got["extra_logs"]["answer_format_rate"].tolist() == [1.0, 1.0, 1.0, 0.0]


HOLES = {
    "the first equation is a step and not the answer": ("6 = 6, so 6*7 = 42. The answer is 42.", "42", 1.0),
    "thousands have commas": ("The answer is 1,000.", "1000", 1.0),
    "the prompt again in the answer": (f"You ask {PROMPT} and the answer is 42. {PROMPT}", "42", 1.0),
    "a number that would overflow a float": ("The answer is 10^400.", "42", 0.0),
    "an endless power": ("The answer is 9^9^9^9^9.", "42", 0.0),
}


@pytest.mark.parametrize("hole", HOLES)
def test_math_is_without_the_guides_hole(hole):
    answer, label, expected = HOLES[hole]
    reward = math_rewards((answer, label))["rewards"].item()
    assert reward == expected or (hole == "an endless power" and reward in (0.0, -0.5))


@pytest.mark.parametrize("label", ["", None, math.nan, []])
def test_a_label_that_is_not_an_answer_is_an_error_and_no_reward(label):
    with pytest.raises(DataError):
        math_rewards(("The answer is 42.", label))


# --- code -----------------------------------------------------------------------------------------------------------

LABEL = {
    "entry_point": "add",
    "visible": [{"args": [1, 2], "expected": 3}],
    "hidden": [{"args": [5, -5], "expected": 0}],
}


def code(text):
    return f"```python\n{text}\n```"


@pytest.mark.long
def test_code_has_the_guides_scale_and_no_reward_for_the_word_passed():
    expected = {
        code("def add(a, b): return a + b") + "<|im_end|>": 1.0,
        code("def add(a, b): return 3"): 0.3,
        code("def add(a, b): return 'x'"): 0.0,
        code("print('1 passed')\ndef test_it(): pass\ndef add(a, b): return None"): 0.0,
        code("import os\nprint('3 passed')\nos._exit(0)"): -1.0,
        code("def add(a, b)"): -1.0,
        "No.": -1.0,
    }
    reward_func = load_reward_func(FILES / "reward_code.py")
    prompt = f"As here:\n{code('def add(a, b): return a + b')}\n"
    num = len(expected)
    queries = [prompt + each for each in expected]
    got = is_an_answer(reward_func(queries, [prompt] * num, [json.dumps(LABEL)] * num), num)
    assert got["rewards"].tolist() == pytest.approx(list(expected.values()))
    assert got["scores"].tolist() == pytest.approx([(reward + 1) / 2 for reward in expected.values()])
    assert got["extra_logs"]["correct"].tolist() == [float(reward == 1.0) for reward in expected.values()]
    assert set(got["extra_logs"]) == {"code_correctness", "correct", "passed_share"}


def test_an_error_of_a_rewards_code_is_no_failure_of_infrastructure():
    with pytest.raises(ContractError, match=r"reward_func: answer 0: no grade \(error\): .* got None"):
        grade_or_raise(FunctionReward(lambda response: None), [Response("a")])


# --- conversation ---------------------------------------------------------------------------------------------------

LONG = "yes it is good and so it goes on with more words"
USER = "user what is the answer assistant "
WORDS = sorted({*LONG.split(), *USER.split(), "no", "bad", "in", "all"})


def classifier(folder, *, id2label, seed=0):
    """A tiny BERT with a tokenizer of words, saved; its classes have these names."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    vocab = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_max_length=32,
    )  # fmt: skip
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(vocab), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=32, id2label=id2label, label2id={name: index for index, name in id2label.items()},
        initializer_range=0.4,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return classifier(tmp_path_factory.mktemp("two"), id2label={0: "LABEL_0", 1: "LABEL_1"})


def logits(folder, text):
    """What the model says of a text alone."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, truncation_side="left")
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        return model(**tokenizer(text, return_tensors="pt", truncation=True, max_length=32)).logits[0]


def quality(function, *texts, prompt=USER):
    num = len(texts)
    return is_an_answer(function([prompt + text for text in texts], [prompt] * num, [""] * num), num)


def test_a_conversations_reward_is_the_probability_of_the_good_class(two):
    got = quality(conversation_reward_func(two), LONG)
    expected = logits(two, USER + LONG).softmax(-1)[1]
    assert got["rewards"].item() == pytest.approx(float(expected), abs=1e-5)
    assert got["scores"].tolist() == got["rewards"].tolist()
    assert got["extra_logs"]["short"].tolist() == [0.0]


def test_a_reward_model_of_one_output_is_not_turned_around(tmp_path):
    folder = classifier(tmp_path, id2label={0: "LABEL_0"})
    got = quality(conversation_reward_func(folder), LONG)
    assert got["rewards"].item() == pytest.approx(float(logits(folder, USER + LONG).sigmoid()), abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("names", "label", "index"),
    [
        ({0: "LABEL_1", 1: "LABEL_0"}, None, 0),
        ({0: "POSITIVE", 1: "NEGATIVE"}, None, 0),
        ({0: "toxic", 1: "calm", 2: "funny"}, "calm", 1),
    ],
)
def test_the_good_class_is_found_by_its_name_in_the_model(names, label, index, tmp_path):
    folder = classifier(tmp_path, id2label=names)
    got = quality(conversation_reward_func(folder, label=label), LONG)
    assert got["rewards"].item() == pytest.approx(float(logits(folder, USER + LONG).softmax(-1)[index]), abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("label", [None, "LABEL_1"])
def test_a_class_that_nothing_calls_good_has_to_be_named(label, tmp_path):
    folder = classifier(tmp_path, id2label={0: "toxic", 1: "calm"})
    with pytest.raises(ConfigError, match=r"AGENTENV_CONVERSATION_LABEL: expected one class of \['toxic', 'calm'\]"):
        conversation_reward_func(folder, label=label)


def test_a_long_conversation_loses_its_beginning_and_never_the_answer(two):
    function, prompt = conversation_reward_func(two), "user " + "so it goes on " * 40 + "assistant "
    first, second = quality(function, LONG, "no " * 12, prompt=prompt)["rewards"].tolist()
    assert abs(first - second) > 0.01
    assert first == pytest.approx(float(logits(two, prompt + LONG).softmax(-1)[1]), abs=1e-5)


def test_a_short_answer_is_worth_half_an_empty_one_nothing_and_a_thought_no_answer(two):
    function = conversation_reward_func(two)
    got = quality(function, "yes", "", "<think>yes it is good", f"<think>no</think>{LONG}", "答案是四十二没有别的答案")
    rewards, seen = got["rewards"].tolist(), got["extra_logs"]["quality"].tolist()
    assert rewards == pytest.approx([seen[0] / 2, 0.0, 0.0, seen[3], seen[4]])
    assert seen[3] == pytest.approx(float(logits(two, USER + LONG).softmax(-1)[1]), abs=1e-5)
    assert got["extra_logs"]["short"].tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_a_model_that_returns_no_number_is_a_failure_and_no_reward(two, monkeypatch):
    function = conversation_reward_func(two)
    held = function.__closure__
    model = next(each.cell_contents for each in held if hasattr(each.cell_contents, "qualities"))._model
    with torch.no_grad():
        model.classifier.bias.fill_(math.nan)
    with pytest.raises(InfraError, match="expected numbers, got"):
        quality(function, LONG)


def test_the_environment_names_the_model_that_is_loaded_once(two, monkeypatch):
    monkeypatch.delenv("AGENTENV_CONVERSATION_MODEL", raising=False)
    reward_func = load_reward_func(FILES / "reward_conversation.py")
    with pytest.raises(ConfigError, match="AGENTENV_CONVERSATION_MODEL: expected"):
        quality(reward_func, LONG)
    monkeypatch.setenv("AGENTENV_CONVERSATION_MODEL", two)
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda text: quality(reward_func, text)["rewards"].item(), [LONG] * 4))
    assert made == pytest.approx([made[0]] * 4, abs=1e-4)  # in batches of other sizes, sums have another order
    made_once = reward_func.__globals__["_configured_reward_func"].cache_info()
    assert made_once.misses == 2, "one without a name, and one model"


WRONG = [
    ({"short_factor": 2.0}, "short_factor: expected a number"),
    ({"max_length": 1}, "max_length: expected a whole number"),
    ({"device": "nowhere"}, "got .* on 'nowhere'"),
]


@pytest.mark.parametrize(("options", "said"), WRONG)
def test_wrong_arguments_are_refused(options, said, two):
    with pytest.raises(ConfigError, match=said):
        conversation_reward_func(two, **options)


@pytest.mark.long
def test_loading_the_files_imports_neither_torch_nor_transformers():
    program = (
        "import sys; from agentenv.interop.agent_files import load_reward_func; "
        f"[load_reward_func('{FILES}/reward_' + name + '.py') for name in ('math', 'code', 'conversation')]; "
        "sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode == 0
