"""Multiple choice: which texts name which option, which are refused, and what ROLL's workers got wrong."""

import time
from functools import partial

import pytest

from agentenv.errors import DataError
from agentenv.rewards.registry import make_reward
from agentenv.rewards.rules.choice import ChoiceReward
from agentenv.rewards.types import Response, Status

general_val, crossthink = partial(make_reward, "general_val"), partial(make_reward, "crossthink_qa")
CITIES = {"options": ["Paris", "London", "Vitamin C", "Both A and B"]}


async def chosen(text, label="B", metadata=None, **options):
    """The option that a text is taken to name, or its status."""
    result = await ChoiceReward(**options).grade(Response(text, label, metadata=metadata or {}))
    assert result.reward == result.score == float(result.extracted == label)
    return result.extracted if result.status is Status.OK else result.status


@pytest.mark.parametrize(
    "box",
    [
        "B", "b", "(B)", "[B]", "{B}", r"\{B\}", "B.", "$B$", "**B**",
        '"B"', r"\text{B}", r"\text{(B)}",
        r"\mathbf{\text{B}}", r"\boxed{B}", r"\text{B. Paris}", r"B \text{ (Paris)}", "Ｂ",
        "Ｂ：Paris", "B) Paris", "B. Paris", "B - Paris",
        "B (Paris)", "b) paris", "The correct one is B", "the answer is B", "Option B",
        "option (b)", "B is correct",
        "The correct option is (B) Paris", "Answer: B", "选B", "答案是B",
        "It's clear: (B) is right", "B) both of them and none",
        "B) A or none of them", r"\bf B", r"\large B", r"\textcolor{red}{(B)}", "It's B",
        r"B \tag{1}",
    ],
)  # fmt: skip
async def test_a_box_that_names_one_option(box):
    assert await chosen(rf"So \boxed{{{box}}}.") == "B"


@pytest.mark.parametrize(
    "box",
    [
        "Bananas", "Be careful", "AB", "B1", "vitamin B", "Paris", "2", "-",
        r"\frac{B}{2}", "A or B", "A/B", "either A or B", "AB or B",
        "A, B, or C", "A或B", "B. Paris or C. London", "The answer is A or B",
        "B or Z", "B (or A)", "not B", "It isn't B",
        "anything except B", "not A but B", "不是B", "B is wrong", "Z", "Option K", "It is A boat",
        "I think so", "The answer is vitamin B", "e.g. bananas",
        "London (B)", "B, London", "Peter's B",
    ],
)  # fmt: skip
async def test_a_box_that_names_none_or_several_is_refused(box):
    assert await chosen(rf"So \boxed{{{box}}}.") is Status.PARSE_ERROR


@pytest.mark.parametrize(
    "box", ["A", "A is correct", "The answer is A because it fits", "a", "It is A.", "option a", "A cat"]
)
async def test_the_letter_a_is_an_option_and_the_word_is_none(box):
    assert await chosen(rf"\boxed{{{box}}}", "A") == (Status.PARSE_ERROR if box == "A cat" else "A")


@pytest.mark.parametrize(
    ("box", "answer"),
    [
        ("London", "B"),
        ("  london. ", "B"),
        ("Both A and B", "D"),
        ("D. both A and B.", "D"),
        ("B) London", "B"),
        ("B) Paris", Status.PARSE_ERROR),
        ("London (B)", "B"),
        ("B, London", "B"),
        ("D, both A and B", "D"),
        ("Paris (B)", Status.PARSE_ERROR),
        ("Berlin (B)", Status.PARSE_ERROR),
        ("A, B, London", Status.PARSE_ERROR),
        ("E", Status.PARSE_ERROR),
    ],
)
async def test_the_text_of_an_option_names_it_where_the_row_has_the_options(box, answer):
    assert await chosen(rf"\boxed{{{box}}}", "B", CITIES) == answer


@pytest.mark.parametrize(
    "box",
    [
        "B (90%), A (10%)", "B (likely), A (less likely)", "B - 90%; A - 10%", "B (0.9) A (0.1)", "B...D", "B…D",
        "B - D", "B to D", "B+A", "B > A", "B. London and Paris", "B. London / Paris", "B. London/Paris",
        "B. London & Paris", "B. London | Paris", "B (London or Paris)", "B. London (or Paris)",
        "B. London; maybe Paris", "B (London) / A (Paris)",
    ],
)  # fmt: skip
async def test_shares_ranges_and_texts_of_several_options_are_hedges(box):
    assert await chosen(rf"\boxed{{{box}}}", "B", CITIES) is Status.PARSE_ERROR


async def test_an_option_whose_text_holds_another_ones_is_no_hedge():
    options = {"options": ["Salt and pepper", "Pepper"]}
    assert await chosen(r"\boxed{A. Salt and pepper, since it fits}", "A", options) == "A"
    assert await chosen(r"\boxed{A. Salt and pepper, or pepper}", "A", options) is Status.PARSE_ERROR


@pytest.mark.parametrize("box", ["B (90%)", "B: 90%", "B. London!", "B – London", "D. Both A and B", "B (f(x) = 2)"])
async def test_one_option_with_its_share_or_text_is_no_hedge(box):
    assert await chosen(rf"\boxed{{{box}}}", box[0], CITIES) == box[0]


async def test_rows_may_hold_arrays_and_their_numbers():
    import numpy as np

    texts = np.array(["Paris", "London"], dtype=object)
    for options in (texts, {"label": np.array(["A", "B"]), "text": texts}):
        response = Response(r"\boxed{london}", np.int64(1), metadata={"options": options})
        assert (await ChoiceReward().grade(response)).reward == 1.0


async def test_options_with_the_same_text_are_a_hedge():
    twins = {"options": ["yes", "no", "Yes."]}
    assert await chosen(r"\boxed{yes}", "A", twins) is Status.PARSE_ERROR
    assert await chosen(r"\boxed{A}", "A", twins) == "A"


@pytest.mark.parametrize(
    ("label", "options", "index_base", "letter"),
    [
        ("B", None, 0, "B"), ("(B)", None, 0, "B"),
        (r"\boxed{B}", None, 0, "B"), ("B) London", None, 0, "B"), (1, None, 0, "B"), (2, None, 1, "B"),
        ("2", None, 1, "B"), ("London", ["Paris", "London"], 0, "B"), ("1", ["0", "1"], 0, "B"),
        (1, {"A": "Paris", "B": "London"}, 0, "B"), ("Y", {"X": "Paris", "Y": "London"}, 0, "Y"),
        ("B", {"label": ["A", "B"], "text": ["x", "y"]}, 0, "B"),
        ("2", {"label": ["1", "2"], "text": ["x", "y"]}, 1, "B"),
    ],
)  # fmt: skip
async def test_labels_are_letters_indices_or_texts(label, options, index_base, letter):
    response = Response(rf"\boxed{{{letter}}}", label, metadata={"options": options})
    assert (await ChoiceReward(index_base=index_base).grade(response)).reward == 1.0
    other = Response(r"\boxed{A}" if letter == "B" else r"\boxed{X}", label, metadata={"options": options})
    assert (await ChoiceReward(index_base=index_base).grade(other)).reward == 0.0


@pytest.mark.parametrize(
    ("label", "options"),
    [
        (None, None), ("", None), ("Z", None), ("A or B", None), (True, None),
        (-1, None), (10, None), (float("nan"), None), ({}, None), ("C", ["x", "y"]), (2, ["x", "y"]),
        ("x", ["x", "x"]), ("B", []), ("B", ["x", 2]), ("B", {"AB": "x"}),
        ("B", {"label": None, "text": ["x"]}), ("B", {"label": 7, "text": ["x"]}),
        ("B", ["x"] * 27), ("B", {"label": ["A"], "text": ["x", "y"]}), ("B", {"A": "x", "a": "y"}),
    ],
)  # fmt: skip
async def test_a_row_without_one_right_option_is_a_data_error(label, options):
    with pytest.raises(DataError):
        await ChoiceReward().grade(Response(r"\boxed{B}", label, metadata={"options": options}))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("B", "B"), ("B. London", "B"), (r"\boxed{B}", "B"), ("London", "B"),
        ("<answer>B</answer>", "B"), ("<answer>A</answer> or <answer>B</answer>", "B"), ("The answer is B.", "B"),
        ("the correct answer is: (B)", "B"), ("**Answer:** B", "B"),
        ("The answer is B because A is wrong.", "B"),
        ("The answer is option B. Not A.", "B"), ("The answer is London, since it is.", "B"),
        ("The final answer is:\n\n(B)", "B"), ("答案是B。", "B"),
        ("The answer is A. No, the answer is B.", "B"), ("The answer is B. I hope this answer is helpful.", "B"),
        ("A or B? The answer is B", "B"), ("I think A at first.\nAnswer: B\nThank you.", "B"),
        ("The answer is A or B.", Status.PARSE_ERROR), ("The answer is not B.", Status.PARSE_ERROR),
        ("A or B", Status.PARSE_ERROR), ("The answer is a boat.", Status.PARSE_ERROR),
        ("I think so", Status.NO_ANSWER),
        ("", Status.NO_ANSWER),
        ("Clearly B it is, said Mr. D.", Status.NO_ANSWER),
        ("<think>The answer is B", Status.NO_ANSWER), ("so it is B", "B"),
        ("A is cheap.\nTherefore, option B is correct.", "B"), ("Thus, B is the correct answer.", "B"),
        ("So A is not correct.", Status.NO_ANSWER), ("It is false that B is correct.", Status.PARSE_ERROR),
        ("A is correct\nand so on.", Status.NO_ANSWER),
        ("The answer is London. Or Paris.", Status.PARSE_ERROR), ("The answer is B. Paris", Status.PARSE_ERROR),
        ("The answer is B. London", "B"), ("The answer is B. London is in England.", "B"),
        ("The answer is B.\n\nA. Paris is in France.", "B"), ("The answer is B. C) is wrong.", "B"),
        ("So both A and B are correct.", Status.PARSE_ERROR),
        ("So the best choice is **B. London**", "B"), ("### Answer\n\n**B) London**", "B"),
        ("## Final answer\nB", "B"),
        ("<answer>B", "B"), ("The answer to the question is B.", "B"),
        ("The answer is B, not A.", "B"),
        ("The answer is certainly not B.", Status.PARSE_ERROR), ("故选B。", "B"), ("正确选项是B", "B"),
        ("【答案】B", "B"),
        ("因此，应选择B。", "B"), ("选项A错误。", Status.NO_ANSWER),
    ],
)  # fmt: skip
async def test_answers_without_a_box(text, answer):
    assert await chosen(text, "B", CITIES, require_box=False) == answer


@pytest.mark.parametrize(
    "text",
    [
        "I choose B.", "So it's (B).", "We get x=3. I choose B.", "I'd go with B.", "Therefore, B.", "Hence (B)",
        "It must be B.", "My choice is B.", "I'll select option B.", "I choose B, since A is wrong.", "Final choice: B",
        'I choose "B".', "Let's go with B", "I am confident that it's B.", "The right pick is B",
        "Let me think.\nB", "Because of x.\n\n**B**", "Because of x.\n\nOption (B).", "A or C?\nSo it’s B",
        "I choose A. No, I choose B.", "Not sure, but I'd go with B.",
        "The answer is B. Or is it? Yes, B.", "The answer is B. Or, in words: London.",
        "Answer: B\nPerhaps a figure helps.", "The answer is B. A is wrong.", "A man runs, so the answer is B.",
        "The answer is not obvious. Perhaps the answer is B.", "The answer is A or so. No, the answer is B.",
        "\\boxed{42}\n\n**Answer: B**", r"\boxed{x=2}. So it is B.", r"\boxed{B} \boxed{42} Answer: B",
    ],
)  # fmt: skip
async def test_a_last_line_that_commits_to_an_option_and_what_follows_a_box_without_one(text):
    assert await chosen(text, require_box=False) == "B"


@pytest.mark.parametrize(
    "text",
    [
        "The answer is A, unless it is B.", "The answer is A but could be B.", "Answer: B = A", "Answer: B, or it is A",
        "The answer is B. Or A.", "The answer is B. Alternatively, A.", "Answer: B\nMaybe A.",
        "I choose B. I choose A.",
        "If it is pure, the answer is A, otherwise the answer is B.", "So it is B. Or A.",
        "The answer is B if it is pure. Otherwise, the correct answer is A.", "The answer is B, or the answer is A.",
        "A\nB", "Option A\nOption B", "A. Paris\nB. London", "I choose B or C.", "So it's (A) or (B).",
        "Therefore, B and C.", "So vitamin B is needed", "I do not choose B.", "I would never choose B.",
        "So it's not B.", "It's B or not B.", "Thus B is wrong.", "I choose between A and B", "x\nPlan B",
        "So, in group B, it rises", "I choose B.\nOr not.", "\\boxed{A}\n\nAnswer: B", "\\boxed{A or B}\n\nAnswer: B",
        "Answer: B\n\\boxed{42}",
    ],
)  # fmt: skip
async def test_a_last_line_that_commits_to_no_option_and_what_a_box_does_not_leave_open(text):
    assert await chosen(text, require_box=False) != "B"


@pytest.mark.parametrize(
    ("scale", "rewards"), [("loose", (1, 1, -1, -1)), ("soft", (1, 0.5, -0.5, -1)), ("strict", (1, -1, -1, -1))]
)
async def test_the_three_scales(scale, rewards):
    texts = (r"\boxed{B}", "The answer is B.", r"\boxed{A}", "The answer is A.")
    for text, expected in zip(texts, rewards, strict=True):
        for reward in (general_val(scale=scale), crossthink(scale=scale)):
            result = await reward.grade(Response(text, "B"))
            assert (result.reward, result.score) == (expected, float(expected > 0))


@pytest.mark.parametrize("tag", ["ceval", "race_high", "mmlu_pro", "commonsense_qa", None])
async def test_general_val_takes_its_four_tags(tag):
    assert (await general_val().grade(Response("B", "B", metadata={"tag": tag}))).reward == 1.0


@pytest.mark.parametrize("tag", ["math", "", 3, ["ceval"]])
async def test_an_unknown_tag_is_an_error_and_never_the_last_samples_score(tag):
    with pytest.raises(DataError, match="ceval"):
        await general_val().grade(Response("B", "B", metadata={"tag": tag}))
    assert (await general_val(tags=None).grade(Response("B", "B", metadata={"tag": tag}))).reward == 1.0


async def test_crossthink_punishes_repetition_at_most_by_half():
    text = "so " * 500 + r"\boxed{B}"
    result = await crossthink().grade(Response(text, "B"))
    assert result.components["choice"] == 1.0
    assert -0.5 <= result.components["repetition"] < -0.49
    assert result.reward == pytest.approx(1.0 + result.components["repetition"])


@pytest.mark.parametrize(("num_words", "length"), [(1, -0.5), (100, -0.5), (250, -0.25), (400, 0.0), (2000, 0.0)])
async def test_crossthink_measures_the_text_and_punishes_short_ones(num_words, length):
    text = " ".join([r"\boxed{B}", *(f"w{i}" for i in range(num_words - 1))])
    padded = text + "<|endoftext|>" * 300
    for reward in (crossthink(length_coefficient=2.0), crossthink(length_coefficient=2.0, count=count_words)):
        for one in (text, padded):
            result = await reward.grade(Response(one, "B"))
            assert result.components["length"] == pytest.approx(length)
            assert result.reward == pytest.approx(1.0 + 2.0 * length)


def count_words(text):
    return len(text.split())


HOSTILE = [
    "A , B , C , " * 5000 + "!", r"\boxed{" * 20_000, r"\boxed{" + "A , " * 300 + "!}", "answer is " * 20_000,
    "<answer>" * 20_000, r"\boxed{" + "(A) or " * 140 + "x}", r"\boxed{" + "is " * 300 + "}",
    "<answer>A" * 10_000 + "<", "correct option " * 8000, "answer to " * 9000,
    "# answer \n" * 9000, "A or " * 40 + "is", "选" * 90_000,
    r"\boxed{" + r"\text{" * 150 + "B" + "}" * 150 + "}", r"\boxed{" + "A. " * 300 + "?}", "{" * 100_000,
    "answer " + "*" * 100_000, r"\boxed{is " + "the A " * 160 + "}",
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(HOSTILE)))
async def test_hostile_texts_take_no_cubic_time(number):
    started = time.process_time()
    for reward in (ChoiceReward(), general_val()) * 5:
        assert (await reward.grade(Response(HOSTILE[number], "B", metadata=CITIES))).reward <= 0.0
    assert time.process_time() - started < 30.0  # some 0.1 s; cubic time would take minutes
