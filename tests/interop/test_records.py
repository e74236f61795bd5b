"""Episodes as samples of trainers: a golden example of each form, and the tokens and numbers of any record in it."""

import math

import pytest

from agentenv.core.trajectory import EpisodeError, Trajectory
from agentenv.core.types import Completion, StepResult, StopReason, Task
from agentenv.errors import DataError
from agentenv.interop import trl
from agentenv.interop._records import columns, records
from agentenv.interop.nemo_rl import records as nemo_rl
from agentenv.interop.skyrl.generator import segment_rows
from agentenv.interop.verl import records as verl


def decode(ids):
    return " ".join(map(str, ids))


def export(module, trajectory):
    return module.to_records(trajectory, **({"decode": decode} if module is nemo_rl else {}))


FORMATS = (nemo_rl, verl)
every_format = pytest.mark.parametrize("module", FORMATS, ids=["nemo_rl", "verl"])


# --- golden examples, worked out by hand ----------------------------------------------------------------------------


def golden():
    """Prompt 1 2, action 10 11 (cut, so 90 closes its turn), observation 3, action 12 13, a last observation 4."""
    trajectory = Trajectory(Task("1 2", label="42", task_id="t"), max_length=32, episode_id="t/0", prompt="1 2")
    trajectory.append_observation([1, 2])
    first = Completion((10, 11), "length", logprobs=(-0.5, -0.25), policy_versions=(3, 4))
    trajectory.append_turn(first, "10 11", generate_s=2.0)
    trajectory.set_result(StepResult("3", reward=0.5), step_s=1.0)
    trajectory.append_observation([90, 3], bridge="truncated", num_synthesized=1)
    trajectory.append_turn(Completion((12, 13), logprobs=(-1.0, -2.0), policy_version=4), "12", generate_s=2.0)
    trajectory.set_result(StepResult("4", reward=1.0), step_s=1.0)
    trajectory.append_observation([4], bridge="text")
    trajectory.finish(StopReason.MAX_TURNS)
    return trajectory


FACTS = {
    "turn_scores": [0.5, 1.0],
    "turn_spans": [[0, 2], [4, 6]],
    "policy_versions": [3, 4, -1, -1, 4, 4],
    "stop_reason": "max_turns",
    "finish_reason": "stop",
    "episode_id": "t/0",
    "segment": 0,
    "num_segments": 1,
}


def forced(*per_turn):
    made = golden()
    for turn, indices in zip(made.turns, per_turn, strict=True):
        turn.forced = indices
    return made


def gae(rewards, mask):
    """The advantages of verl for values of 0 and both factors 1: what is off the mask is skipped."""
    future, found = 0.0, []
    for reward, chosen in zip(reversed(rewards), reversed(mask), strict=True):
        future = reward + future if chosen else future
        found.append(future)
    return found[::-1]


@every_format
def test_what_a_constraint_forced_is_off_every_loss_mask(module):
    (row,) = export(module, forced((0,), (1,)))
    if module is verl:
        assert row["response_mask"] == [0, 1, 0, 0, 1]
    else:
        roles = [message["role"] for message in row["message_log"][1:] for _ in message["token_ids"]]
        assert [role == "assistant" for role in roles] == [False, True, False, False, True, False]


@pytest.mark.parametrize("indices", [((), ()), ((1,), (1,)), ((0,), (0, 1)), ((0, 1), (1,))])
def test_the_reward_reaches_a_token_that_the_policy_chose(indices):
    made = forced(*indices)
    (row,) = export(verl, made)
    mask = row["response_mask"]
    assert mask[-1] == 1
    assert gae([0.0] * (len(mask) - 1) + [row["reward_score"]], mask)[mask.index(1)] == 1.5
    (row,) = segment_rows(made, "an id")
    chosen = [reward for reward, taken in zip(row["rewards"], row["loss_masks"], strict=True) if taken]
    assert sum(chosen) == (1.0 if indices[0] == (0, 1) else 1.5)  # no choice of the policy led to the first reward
    assert math.fsum(row["rewards"]) == 1.5


def test_skyrls_reward_of_an_action_is_at_the_last_token_of_it_that_the_policy_chose():
    assert segment_rows(forced((1,), (1,)), "an id")[0]["rewards"] == [0.5, 0.0, 0.0, 0.0, 1.0, 0.0]
    assert segment_rows(forced((1,), (0, 1)), "an id")[0]["rewards"] == [1.5, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_verls_record_ends_with_the_last_choice_and_so_do_its_facts():
    (row,) = export(verl, forced((), (1,)))
    facts = {**FACTS, "turn_spans": [[0, 2], [4, 5]], "policy_versions": [3, 4, -1, -1, 4]}
    assert (row["response_ids"], row["extra_fields"], row["num_turns"]) == ([10, 11, 90, 3, 12], facts, 4)
    (row,) = export(verl, forced((1,), (0, 1)))
    facts = {**FACTS, "turn_spans": [[0, 1]], "policy_versions": [3], "turn_scores": [1.5]}
    assert (row["response_ids"], row["extra_fields"], row["num_turns"]) == ([10], facts, 4)


@every_format
def test_an_episode_without_any_choice_is_a_record_all_the_same(module):
    rows = export(module, forced((0, 1), (0, 1)))
    assert len(rows) == 1


def test_verl():
    (row,) = export(verl, golden())
    assert row == {
        "prompt_ids": [1, 2],
        "response_ids": [10, 11, 90, 3, 12, 13],
        "response_mask": [1, 1, 0, 0, 1, 1],
        "response_logprobs": [-0.5, -0.25, 0.0, 0.0, -1.0, -2.0],
        "reward_score": 1.5,
        "num_turns": 4,
        "metrics": {"generate_sequences": 4.0, "tool_calls": 2.0},
        "extra_fields": FACTS,
    }


def test_nemo_rl():
    (row,) = export(nemo_rl, golden())
    assert row == {
        "message_log": [
            {"role": "user", "content": "1 2", "token_ids": [1, 2]},
            {"role": "assistant", "content": "10 11", "token_ids": [10, 11], "generation_logprobs": [-0.5, -0.25]},
            {"role": "environment", "content": "90 3", "token_ids": [90, 3]},
            {"role": "assistant", "content": "12 13", "token_ids": [12, 13], "generation_logprobs": [-1.0, -2.0]},
        ],
        "length": 8,
        "loss_multiplier": 1.0,
        "total_reward": 1.5,
        "truncated": True,
        "extra_env_info": FACTS,
    }


def test_trl():
    assert trl._record(golden()) == {
        "prompt_ids": [1, 2],
        "completion_ids": [10, 11, 90, 3, 12, 13],
        "logprobs": [-0.5, -0.25, 0.0, 0.0, -1.0, -2.0],
        "env_mask": [1, 1, 0, 0, 1, 1],
        "reward": 1.5,
        **FACTS,
    }


def test_skyrl():
    rows = segment_rows(golden(), "the input's")
    assert columns(rows) == {
        "prompt_token_ids": [[1, 2]],
        "response_ids": [[10, 11, 90, 3, 12, 13]],
        "rewards": [[0.0, 0.5, 0.0, 0.0, 0.0, 1.0]],
        "loss_masks": [[1, 1, 0, 0, 1, 1]],
        "stop_reasons": ["stop"],
        "rollout_logprobs": [[-0.5, -0.25, 0.0, 0.0, -1.0, -2.0]],
        "trajectory_ids": ["the input's"],
        "is_last_step": [True],
    }


# --- any episode ----------------------------------------------------------------------------------------------------

FAILURES = [StopReason.ERROR, StopReason.ABORTED, StopReason.STEP_TIMEOUT]


def played(*plan, end=StopReason.TERMINATED):
    """An episode of turns, by their rewards, and of what follows them; a turn of no reward has no answer."""
    trajectory = Trajectory(Task("q", label=7), 1000, episode_id="task/1", prompt="q")
    trajectory.append_observation([1, 2])
    for index, part in enumerate(plan):
        if part == "observation":
            trajectory.append_observation([20 + index], bridge="exact")
        elif part == "close":
            trajectory.append_observation([90, 3], bridge="truncated", num_synthesized=1)
        elif part == "segment":
            trajectory.open_segment([1, 30 + index])
        else:
            action = Completion((10 + index, 11), logprobs=(-0.5, -0.25), policy_versions=(index, index + 1))
            trajectory.append_turn(action, f"action {index}")
            if part is not None:
                trajectory.set_result(StepResult("r", reward=part))
    trajectory.finish(end, EpisodeError("infra", "EngineError", "it burned") if end is StopReason.ERROR else None)
    return trajectory


PLANS = [
    (0.5,), (0.25, 0.5), (0.5, "observation", -1.0), (0.5, "close", 0.0, "observation", 1.0, "observation"),
    (0.5, "segment", 1.0, "close", 0.25), (1.0, "segment", "segment", 0.5, 0.25),
]  # fmt: skip
every_plan = pytest.mark.parametrize("plan", PLANS, ids=str)


@every_plan
def test_a_record_is_its_segment_up_to_the_end_of_the_last_action_in_each_form(plan):
    trajectory = played(*plan)
    with_actions = [s for i, s in enumerate(trajectory.segments) if any(t.segment == i for t in trajectory.turns)]
    made, of_verl, of_nemo = records(trajectory, "here"), export(verl, trajectory), export(nemo_rl, trajectory)
    for record, segment, row, sample in zip(made, with_actions, of_verl, of_nemo, strict=True):
        end = len(segment) - bytes(segment.action_mask)[::-1].index(1)
        first = segment.action_mask.index(1)
        assert record.token_ids == segment.token_ids[:end].tolist()
        assert bytes(record.mask) == segment.action_mask[:end]
        assert record.logprobs == segment.logprobs[:end].tolist()
        assert record.policy_versions == segment.policy_versions[:end].tolist()
        assert (record.prompt_ids, record.num_prompt) == (segment.token_ids[:first].tolist(), first)
        assert row["prompt_ids"] + row["response_ids"] == record.token_ids
        assert (row["response_mask"], row["response_logprobs"]) == (record.response_mask, record.response_logprobs)
        log = [(each, len(each["token_ids"])) for each in sample["message_log"]]
        assert [token for each, _ in log for token in each["token_ids"]] == record.token_ids
        assert [int(each["role"] == "assistant") for each, num in log for _ in range(num)] == record.mask
        found = [each.get("generation_logprobs", [0.0] * num) for each, num in log]
        assert [value for values in found for value in values] == record.logprobs
        for facts in (row["extra_fields"], sample["extra_env_info"]):
            assert facts["turn_spans"] == [[start - first, end - first] for start, end in record.spans]
            assert facts["policy_versions"] == record.policy_versions[first:]
    assert [span for record in made for span in record.spans] == [(t.start, t.end) for t in trajectory.turns]
    assert [(record.segment, record.num_segments) for record in made] == [(i, len(made)) for i in range(len(made))]


@every_plan
def test_the_rewards_of_an_episodes_records_sum_to_its_reward(plan):
    trajectory = played(*plan)
    rows = segment_rows(trajectory, "an id")
    assert math.fsum(reward for row in rows for reward in row["rewards"]) == trajectory.reward
    for row in rows:
        assert all(taken or not reward for reward, taken in zip(row["rewards"], row["loss_masks"], strict=True))
    assert [row["is_last_step"] for row in rows] == [False] * (len(rows) - 1) + [True]
    scores = [score for row in export(verl, trajectory) for score in row["extra_fields"]["turn_scores"]]
    assert math.fsum(scores) == trajectory.reward
    for module, key in ((verl, "reward_score"), (nemo_rl, "total_reward")):
        assert {row[key] for row in export(module, trajectory)} == {trajectory.reward}


def test_a_segment_without_an_action_is_not_a_record():
    trajectory = Trajectory(Task("q"), 32, prompt="q")
    for ids in ([1], [1, 2, 5], [1, 2, 6]):
        trajectory.append_observation(ids) if ids == [1] else trajectory.open_segment(ids)
        if ids != [1, 2, 5]:
            trajectory.append_turn(Completion((2,), logprobs=(-1.0,)), "2", generate_s=float(len(ids)))
            trajectory.set_result(StepResult(reward=0.5), step_s=10.0 * len(ids))
    trajectory.finish(StopReason.MAX_LENGTH)
    made = records(trajectory, "here")
    assert [record.token_ids for record in made] == [[1, 2], [1, 2, 6, 2]]
    assert [(record.segment, record.num_segments) for record in made] == [(0, 2), (1, 2)]
    assert [record.finish_reason for record in made] == ["stop", "stop"], "of the last action, which was not cut"
    assert [row["stop_reasons"] for row in segment_rows(trajectory, "an id")] == ["stop", "length"]
    # The second prompt happens to begin with all of the first segment, and is a segment of its own nevertheless.
    rows = export(verl, trajectory)
    assert [row["prompt_ids"] + row["response_ids"] for row in rows] == [[1, 2], [1, 2, 6, 2]]
    assert [tuple(row["metrics"].values()) for row in rows] == [(1.0, 10.0), (3.0, 30.0)]


# --- what a trainer must not be told --------------------------------------------------------------------------------


def test_a_missing_log_probability_is_none_or_refused_and_never_a_number():
    trajectory = played(0.5, "segment", 1.0)
    trajectory.segments[0].logprobs[2] = math.nan
    assert [row["response_logprobs"] is None for row in export(verl, trajectory)] == [True, False]
    with pytest.raises(DataError, match="expected a log-probability for every action token"):
        export(nemo_rl, trajectory)


@pytest.mark.parametrize("end", FAILURES)
@pytest.mark.parametrize("plan", [(), (0.5, "observation", None)], ids=str)
def test_a_failed_episode_is_refused_or_flagged_and_never_given_a_reward(end, plan):
    trajectory = played(*plan, end=end)
    with pytest.raises(DataError, match="expected an episode with a reward"):
        export(verl, trajectory)
    (row,) = export(nemo_rl, trajectory)
    assert (row["loss_multiplier"], row["total_reward"]) == (0.0, None)


@every_format
def test_an_episode_that_still_runs_is_refused(module):
    with pytest.raises(DataError, match="expected a finished episode"):
        export(module, Trajectory(Task("q"), 32))


def test_columns_are_of_rows_with_the_same_keys():
    with pytest.raises(DataError, match="rows of the same keys"):
        columns([{"a": 1}, {"b": 2}])
    assert columns([]) == {}
