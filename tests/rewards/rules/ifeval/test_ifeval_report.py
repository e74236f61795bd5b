"""The benchmark's figures, against counts made by hand."""

import json
from collections import Counter
from pathlib import Path

import pytest

from agentenv.rewards.rules.ifeval.reward import MODES, check_text, instructions_of
from agentenv.rewards.rules.text import final_text

OWN = [json.loads(line) for line in (Path(__file__).parent / "rows.jsonl").read_text().splitlines()]
IFEVAL = Path(__file__).resolve().parents[5] / "shared" / "data" / "ifeval_input_data.jsonl"
shared = pytest.mark.skipif(not IFEVAL.exists(), reason="ifeval_input_data.jsonl is not here")

SHORT = "สวัสดี"
"""One sentence of two words in Thai: no letter, capital, comma or keyword of any row, and no markup."""


def judged(row, response):
    """The ids of the row's instructions, and whether the response follows each, strictly and loosely."""
    instructions = instructions_of(row.get("label"), row)
    text = final_text(response) or ""
    return [each.rule.type for each in instructions], *(check_text(instructions, text, mode) for mode in MODES)


def test_our_own_rows_are_judged_as_by_hand():
    found = [judged(row, row["response"]) for row in OWN]
    assert [each[1:] for each in found] == [(row["strict"], row["loose"]) for row in OWN]
    assert len({name for names, *_ in found for name in names}) == 25


def figures(text):
    """Numbers of prompts and of instructions that the text follows, strictly and loosely, and of each kind strictly."""
    found = [judged(json.loads(line), text) for line in IFEVAL.read_text().splitlines()]
    parts = [part for each in found for part in zip(*each, strict=True)]
    prompts = sum(all(strict) for _, strict, _ in found), sum(all(loose) for *_, loose in found)
    instructions = sum(strict for _, strict, _ in parts), sum(loose for *_, loose in parts)
    kinds = Counter(name for name, strict, _ in parts if strict)
    return (len(found), *prompts), (len(parts), *instructions), dict(kinds)


@shared
def test_a_short_answer_to_all_of_ifeval_scores_as_counted_by_hand():
    assert figures(SHORT) == (
        (541, 62, 62),
        (834, 192, 192),
        {
            "change_case:capital_word_frequency": 7,
            "keywords:forbidden_words": 49,
            "keywords:frequency": 11,
            "keywords:letter_frequency": 11,
            "language:response_language": 1,
            "length_constraints:number_sentences": 29,  # all 28 "less than", and one "at least 1"
            "length_constraints:number_words": 18,
            "punctuation:no_comma": 66,
        },
    )
