"""Answers that the words next to them take back, in every reward that reads them."""

import pytest

from agentenv.rewards.rules.choice import ChoiceReward
from agentenv.rewards.rules.math.answers import extract_answer
from agentenv.rewards.rules.text import standing_box
from agentenv.rewards.types import Response, Status

TAKEN_BACK = [
    r"$\boxed{A}$ is wrong", r"\boxed{A} is not the answer.", r"\boxed{A} is incorrect", r"It is not \boxed{A}.",
    r"\boxed{A} would be wrong, so I do not know", r"The answer isn't \boxed{A}", r"\boxed{A}? No, that is wrong.",
    r"\boxed{A}. Wait, that's wrong.", r"$\boxed{A}$ is the wrong answer", r"\[\boxed{A}\] That is not right.",
    r"\boxed{A} can't be right", r"\boxed{A}, which is false", r"\boxed{A} (wrong)", r"\boxed{A} doesn’t work",
    r"\boxed{A} is a mistake", r"\boxed{A}. Actually, scratch that.", r"A wrong answer is \boxed{A}",
    r"It would be wrong to say $\boxed{A}$", r"x \neq \boxed{A}", r"**\boxed{A}** is clearly incorrect.",
    "\\boxed{A}.\n\nHmm, but this answer is wrong", r"\boxed{A} I was wrong.", r"\boxed{A}是错的",
    "\\boxed{A}\n\nHowever, upon checking, this is wrong.", r"\boxed{A}. I think that is not right.", r"NOT \boxed{A}",
    r"I doubt that the answer is \boxed{A}", r"It is unclear whether it is \boxed{A}", r"I'm not sure if \boxed{A}",
    r"I don't think the final answer is $\boxed{A}$", r"It is unlikely that the answer is **\boxed{A}**",
    r"I cannot say that it is \boxed{A}", r"I am not certain it's \boxed{A}.",
    r"\boxed{A}. Actually no, I take it back.",
    r"It is \boxed{A}. Wait, \boxed{A} is wrong.", r"\boxed{A}. No, \boxed{ A } is wrong.",
    r"\boxed{A}. My answer is wrong.", r"\boxed{A} does not satisfy the equation.", r"\boxed{A}. Ignore the above.",
]  # fmt: skip
STANDING = [
    r"\boxed{A}", r"\boxed{A} is right, and 43 is wrong", r"I first got 43, which is wrong. \boxed{A}",
    r"\boxed{B} is wrong. It is \boxed{A}.", r"The answer is \boxed{A}. Note that 41 is wrong.",
    r"So it's not 41 but \boxed{A}.", r"\boxed{A}. It is not 43.", r"\boxed{A} is the answer, not 41",
    r"\boxed{A}. Wait, let me check. Yes, it is right.", r"If x is not 0, \boxed{A}", r"It is wrong. \boxed{A}",
    r"The student's answer was wrong: \boxed{A}.", "\\boxed{A}\n\nThis is not the only way to see it.",
    r"The relative error: \boxed{A}", r"The number of wrong answers is \boxed{A}", r"Why not? \boxed{A}",
    r"\boxed{A} wrong answers were given.", r"\boxed{A}. If x were 3, that is wrong.", r"x \ne 3, y = \boxed{A}",
    "\\boxed{A}\n\nThus the claim is false.", r"\boxed{A}. It does not depend on n.", r"\boxed{A} (not 43)",
    r"\boxed{A}. No other answer is right.", r"Option B is wrong, \boxed{A}",
    r"\boxed{A} is not only right, it is unique", r"I'm not sure, but the answer is \boxed{A}",
    r"There is no doubt that the answer is \boxed{A}", r"Without a doubt, it is \boxed{A}",
    r"I do not know why, but it is \boxed{A}", r"I'm not sure how one proves that. It is \boxed{A}",
    r"I doubt that it is 43. The answer is \boxed{A}", r"\boxed{B}, or equivalently \boxed{A}",
]  # fmt: skip


@pytest.mark.parametrize("text", TAKEN_BACK)
async def test_a_box_that_is_taken_back_is_no_answer(text):
    assert (extract_answer(text), standing_box(text)) == (None, "")
    result = await ChoiceReward().grade(Response(text, label="A"))
    assert (result.reward, result.status) == (0.0, Status.NO_ANSWER)


@pytest.mark.parametrize("text", STANDING)
async def test_a_box_stands_whatever_else_is_wrong(text):
    assert (extract_answer(text), standing_box(text)) == ("A", "A")
    assert (await ChoiceReward().grade(Response(text, label="A"))).reward == 1.0


@pytest.mark.parametrize(
    "text", ["<answer>42</answer> is wrong.", "The answer is 42. Wait, that's wrong.", r"\boxed 42 is not correct"]
)
def test_answers_of_other_forms_are_taken_back_too(text):
    assert extract_answer(text) is None
    assert extract_answer(text.partition("42")[0] + "42") == "42"


@pytest.mark.parametrize(
    "between",
    [" or ", "$ or maybe $", ", or $x = ", ". Or ", ", otherwise ", " if n is even, else ", "\n\nAlternatively: "],
)
async def test_two_boxes_with_an_or_between_them_are_a_hedge(between):
    text = rf"It is $\boxed{{A}}{between}\boxed{{B}}$."
    assert extract_answer(text) == "A or B"
    assert extract_answer(text + r" No, it is \boxed{B}.") == "B"
    for label in "AB":
        assert (await ChoiceReward().grade(Response(text, label=label))).status is Status.PARSE_ERROR
    assert (await ChoiceReward().grade(Response(text.replace("A", "B"), label="B"))).reward == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "The answer is 5. Wait, that's wrong.", "I doubt that the answer is 5.", "I don't think that the answer is 5.",
        "The answer is 5. Actually no, I take it back; I do not know.", "I am not sure whether the answer is 5.",
        "It is unclear if the answer is 5.",
    ],
)  # fmt: skip
async def test_an_answer_in_a_sentence_is_taken_back_too(text):
    assert extract_answer(text) is None
    for label in "AB":
        choice = Response(text.replace("5", label), label=label)
        assert (await ChoiceReward(require_box=False).grade(choice)).status is Status.NO_ANSWER


def test_boxes_of_which_the_last_is_taken_back_are_no_list():
    assert extract_answer(r"\boxed{1}, \boxed{2} is wrong") == "1"
