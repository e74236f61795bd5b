"""From trajectories to micro-batches, and the mask: what stands between actions reaches neither loss nor gradient."""

import math
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.core.trajectory import EpisodeError, Trajectory
from agentenv.core.types import Completion, StepResult, StopReason, Task
from agentenv.errors import DataError
from agentenv.training.algorithm.advantages import AdvantageOptions, estimate
from agentenv.training.algorithm.batch import build, micro_batches, to_cpu_dict
from agentenv.training.algorithm.corrections import CorrectionOptions
from agentenv.training.algorithm.logprobs import score_tokens
from agentenv.training.algorithm.losses import LossOptions, PolicyInputs, policy_loss, token_weights
from tests.peers.where import versions

VOCAB = 40


def episode(turns, *, group="g", prompt=3, stop=StopReason.TERMINATED, name="e", new_segment=()):
    """Turns as (number of tokens, reward); between them two tokens of the environment's, or a new segment."""
    made = Trajectory(Task("?"), 1000, episode_id=name, group_id=group)
    made.append_observation(range(1, prompt + 1))
    for index, (num, reward) in enumerate(turns):
        ids = tuple((7 * index + 3 * i + num) % VOCAB for i in range(num))
        logprobs = tuple(-0.1 * (i + 1) for i in range(num))
        made.append_turn(Completion(ids, logprobs=logprobs, policy_version=index), "a")
        made.set_result(StepResult(reward=reward))
        if index in new_segment:
            made.open_segment([5, 6, 7, 8])
        elif index < len(turns) - 1:
            made.append_observation([30, 31])
    made.finish(stop)
    return made


def test_a_batch_is_the_action_tokens_one_after_the_other():
    batch = build([episode([(2, 0.5), (1, 1.0)], name="a"), episode([(1, 2.0)], group="h", name="b")])
    assert batch.sequence_N.tolist() == batch.tokens.episode_N.tolist() == [0, 0, 0, 1]
    assert batch.place_N.tolist() == [3, 4, 7, 3]
    assert batch.tokens.turn_N.tolist() == [0, 0, 1, 0]
    assert batch.tokens.rewards_N.tolist() == [0.0, 0.5, 1.0, 2.0]
    assert batch.tokens.group_E.tolist() == [0, 1]
    assert batch.policy_versions_N.tolist() == [0, 0, 1, 0]
    assert batch.logprobs_N.tolist() == pytest.approx([-0.1, -0.2, -0.1, -0.1])
    assert [s.tolist() for s in batch.sequences] == [[1, 2, 3, 2, 5, 30, 31, 8], [1, 2, 3, 1]]
    assert [batch.sequences[s][p].item() for s, p in zip(batch.sequence_N, batch.place_N, strict=True)] == (
        batch.token_ids_N.tolist()
    )
    assert batch.episode_ids == ("a", "b")


def test_what_a_constraint_forced_is_not_trained_on_and_counts_as_no_loss_of_the_engine(caplog):
    made = episode([(3, 0.5), (2, 1.0)])
    made.turns[0].forced = (0, 2)
    batch = build([made], need_logprobs=True)
    assert batch.trained_N.tolist() == [False, True, False, True, True]
    assert batch.forced_N.tolist() == [True, False, True, False, False]
    assert batch.constrained_N.tolist() == [True, True, True, False, False]
    assert batch.tokens.rewards_N.tolist() == [0.0, 0.0, 0.5, 0.0, 1.0]  # a reward on a forced token reaches the others
    assert (batch.num_dropped_tokens, caplog.text) == (0, "")
    trained = [int(i) for micro in micro_batches(batch, max_places=99, packed=True) for i in micro.index_n]
    assert sorted(trained) == [1, 3, 4]


def test_tokens_after_the_last_action_are_left_out():
    cut = episode([(2, 0.0)])
    late = Trajectory(Task("?"), 100)
    late.append_observation([1, 2, 3])
    late.append_turn(Completion((4, 5)), "a")
    late.set_result(StepResult(reward=0.0))
    late.append_observation([9, 9, 9])
    late.finish(StopReason.MAX_LENGTH)
    assert [len(s) for s in build([cut, late]).sequences] == [5, 5]
    assert build([cut, late]).truncated_E.tolist() == [False, True]


def failed():
    made = Trajectory(Task("?"), 100, group_id="g")
    made.append_observation([1, 2])
    made.append_turn(Completion((4, 5)), "a")
    made.finish(StopReason.ERROR, EpisodeError("infra", "InfraError", "down"))
    return made


def test_failed_members_are_counted_and_move_no_baseline():
    good = [episode([(1, 0.0)]), episode([(1, 1.0)])]
    with_failed, without = build([good[0], failed(), good[1]]), build(good)
    assert (with_failed.num_failed, len(with_failed.sequences)) == (1, 2)
    for estimator in ("reinforce_baseline", "rloo", "group_norm", "dr_grpo", "flash_reinforce", "reinforce"):
        one, two = (estimate(b.tokens, AdvantageOptions(estimator)).advantages_N for b in (with_failed, without))
        assert one.tolist() == two.tolist() == [-one[1], one[1]]
        assert one[1] > 0


def test_right_siblings_of_a_failed_episode_have_no_advantage(lost):
    right, zero = [episode([(1, 1.0)]) for _ in range(3)], episode([(1, 0.0)])
    found = {}
    for estimator in ("reinforce_baseline", "rloo", "group_norm", "dr_grpo"):
        batches = build([*right, failed()]), build([*right, zero])
        found[estimator] = [estimate(b.tokens, AdvantageOptions(estimator)).advantages_N[:3].tolist() for b in batches]
    lost(
        "agentenv train", "estimate", versions("agentenv", "agentenv-rl"), gets="no row",
        again="twice, after an infrastructure error (`--max_retries`)", counted="`rollout/num_failed`",
        advantages=found,
    )  # fmt: skip


def test_nothing_at_all_is_an_empty_batch():
    batch = build([failed()])
    assert (batch.num_failed, len(batch.token_ids_N), batch.num_dropped_tokens) == (1, 0, 0)
    assert micro_batches(batch, max_places=10, packed=True) == []
    assert estimate(batch.tokens, AdvantageOptions("rloo")).advantages_N.tolist() == []


def test_an_episode_that_still_runs_is_refused():
    with pytest.raises(DataError, match="still runs"):
        build([Trajectory(Task("?"), 100)])


def test_episodes_without_a_group_are_not_one_group():
    batch = build([episode([(1, 0.0)], group=""), episode([(1, 1.0)], group="")])
    assert batch.tokens.group_E.tolist() == [0, 1]


def test_segments_of_an_episode_share_its_reward_and_count_once():
    """The reward is in the second segment; the first one's tokens get it too, and the episode has one vote."""
    batch = build([episode([(2, 0.0), (1, 1.0)], new_segment=(0,)), episode([(1, 0.0)])])
    assert batch.sequence_N.tolist() == [0, 0, 1, 2]
    assert batch.tokens.episode_N.tolist() == [0, 0, 0, 1]
    assert batch.place_N.tolist() == [3, 4, 4, 3]
    for credit in ("episode", "turn"):
        found = estimate(batch.tokens, AdvantageOptions("dr_grpo", credit=credit)).advantages_N.tolist()
        assert found[:2] + found[3:] == [0.5, 0.5, -0.5]
    weights = token_weights(batch.tokens.episode_N, "seq-mean-token-mean", limit_tokens=1)
    assert weights.tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])


def missing(logprobs):
    made = Trajectory(Task("?"), 100, group_id="g")
    made.append_observation([1, 2])
    for values in logprobs:
        made.append_turn(Completion(tuple(range(len(values))), logprobs=tuple(values)), "a")
        made.set_result(StepResult(reward=1.0))
    made.finish(StopReason.TERMINATED)
    return made


def test_an_action_with_a_missing_log_probability_is_in_no_loss_but_its_reward_is_not_lost(caplog):
    batch = build([missing([[-1.0, -1.0], [-1.0, math.nan], [-2.0]])], need_logprobs=True)
    assert batch.trained_N.tolist() == [True, True, False, False, True]
    assert batch.num_dropped_tokens == 2
    assert "left out 2 of 5 action tokens" in caplog.text
    (micro,) = micro_batches(batch, max_places=100, packed=False)
    assert micro.index_n.tolist() == [0, 1, 4]
    returns = estimate(batch.tokens, AdvantageOptions("reinforce", scale=False)).returns_N
    assert returns[0] == 3.0


def test_a_sequence_without_a_trained_token_goes_through_no_model():
    batch = build([missing([[math.nan]]), missing([[-1.0]])], need_logprobs=True)
    assert [m.sequences for m in micro_batches(batch, max_places=100, packed=True)] == [(1,)]


# --- micro-batches ---------------------------------------------------------------------------------------------------

shapes = st.lists(
    st.lists(st.tuples(st.integers(1, 6), st.floats(-2, 2, width=16)), min_size=1, max_size=3), min_size=1, max_size=8
)


@pytest.mark.long
@given(shapes, st.integers(1, 60), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_action_token_is_in_one_micro_batch_and_the_place_before_it_predicts_it(turns, budget, packed):
    batch = build([episode(t, prompt=1 + i % 4) for i, t in enumerate(turns)])
    micros = micro_batches(batch, max_places=budget, packed=packed)
    assert sorted(torch.cat([m.index_n for m in micros]).tolist()) == list(range(len(batch.token_ids_N)))
    for micro in micros:
        assert micro.num_places <= budget or len(micro.sequences) == 1
        following = torch.cat([micro.input_ids_BT.flatten(), torch.tensor([-1])])[micro.predicts_n + 1]
        assert following.tolist() == micro.token_ids_n.tolist() == batch.token_ids_N[micro.index_n].tolist()
        assert micro.position_ids_BT.flatten()[micro.predicts_n].tolist() == (batch.place_N[micro.index_n] - 1).tolist()
        assert [micro.sequences[s] for s in micro.sequence_n] == batch.sequence_N[micro.index_n].tolist()


def test_padding_is_marked_and_rows_are_neighbors_by_length():
    batch = build([episode([(n, 0.0)]) for n in (1, 7, 2, 6)])
    first, second = micro_batches(batch, max_places=20, packed=False)
    assert (first.sequences, second.sequences) == ((1, 3), (2, 0))
    assert first.attention_mask_BT.sum(1).tolist() == [10, 9]
    assert first.input_ids_BT[1, -1].item() == 0


def test_packing_fills_the_room_that_is_left():
    batch = build([episode([(n, 0.0)]) for n in (7, 3, 5, 1)])  # of 10, 6, 8 and 4 tokens
    packs = micro_batches(batch, max_places=14, packed=True)
    assert [m.sequences for m in packs] == [(0, 3), (2, 1)]
    assert packs[0].position_ids_BT.tolist() == [[*range(10), *range(4)]]


@pytest.mark.parametrize("packed", [False, True])
def test_no_micro_batch_has_more_sequences_than_allowed(packed):
    batch = build([episode([(n, 0.0)]) for n in (7, 3, 5, 1, 2)])
    plan = micro_batches(batch, max_places=1000, packed=packed, max_sequences=2)
    assert [m.sequences for m in plan] == [(0, 2), (1, 4), (3,)]
    plan = micro_batches(batch, max_places=10, packed=packed, max_sequences=2)
    assert max(len(m.sequences) for m in plan) <= 2
    assert all(m.num_places <= 10 for m in plan)


@pytest.mark.parametrize("packed", [False, True])
def test_a_micro_batch_knows_where_its_sequences_end(packed):
    batch = build([episode([(n, 0.0)]) for n in (7, 3, 5)])
    (micro,) = micro_batches(batch, max_places=1000, packed=packed)
    assert micro.packed == packed
    ends = micro.input_ids_BT.flatten()[micro.last_s]
    assert ends.tolist() == [batch.sequences[s][-1].item() for s in micro.sequences]
    assert micro.position_ids_BT.flatten()[micro.last_s].tolist() == [len(batch.sequences[s]) - 1 for s in (0, 2, 1)]


def test_a_micro_batch_goes_to_a_device_whole():
    (micro,) = micro_batches(build([episode([(2, 0.0)])]), max_places=10, packed=True)
    moved = micro.to(torch.device("meta"))
    assert {t.device.type for t in vars_of(moved).values() if isinstance(t, torch.Tensor)} == {"meta"}
    assert (moved.sequences, moved.attention_mask_BT) == ((0,), None)


def vars_of(record):
    return {field.name: getattr(record, field.name) for field in fields(record)}


def test_a_plain_batch_is_written_and_read_without_pickled_classes(tmp_path):
    batch = build([episode([(2, 0.5), (1, 1.0)], name="a"), failed()])
    torch.save(to_cpu_dict(batch), tmp_path / "batch.pt")
    read = torch.load(tmp_path / "batch.pt", weights_only=True)
    assert read.keys() == vars_of(batch).keys()
    assert (read["episode_ids"], read["num_failed"]) == (["a"], 1)
    assert read["tokens"]["rewards_N"].tolist() == [0.0, 0.5, 1.0]


def test_a_micro_batch_can_be_split_again():
    batch = build([episode([(n, 0.0)]) for n in (7, 6, 5)])
    (whole,) = micro_batches(batch, max_places=1000, packed=True)
    halves = micro_batches(batch, max_places=10, packed=True, sequences=whole.sequences)
    assert [m.sequences for m in halves] == [(0,), (1,), (2,)]


# --- the mask -------------------------------------------------------------------------------------------------------


@pytest.mark.long
@given(
    shapes,
    st.sampled_from([math.nan, math.inf, -math.inf, 1e30, 7.0]),
    st.booleans(),
    st.sampled_from(["ppo", "gspo"]),
    st.sampled_from(["off", "token", "sequence"]),
)
@settings(max_examples=60, deadline=None)
def test_tokens_between_actions_change_no_bit_of_loss_or_gradient(turns, poison, packed, kind, level):
    """Their ids, their logits, what the record holds for them: any of it may be anything."""
    clean = [episode(t) for t in turns]
    dirty = [episode(t) for t in turns]
    for made in dirty:
        for segment in made.segments:
            for place, acted in enumerate(segment.action_mask):
                if not acted:
                    segment.token_ids[place] = 0
                    segment.logprobs[place] = poison
                    segment.rewards[place] = poison
                    segment.policy_versions[place] = 99
    correction = CorrectionOptions(level, "clip" if level == "token" else "mask")
    options = LossOptions(kind, correction=correction, kl_coef=0.1, entropy_coef=0.1)
    assert poisoned(clean, None, options, packed) == poisoned(dirty, poison, options, packed)


def poisoned(episodes, poison, options, packed):
    """Bytes of the loss and of the gradient at the places that predict actions; elsewhere it must be zero."""
    batch = build(episodes, need_logprobs=True)
    advantages = estimate(batch.tokens, AdvantageOptions("reinforce_baseline")).advantages_N
    weights = token_weights(batch.tokens.episode_N, "token-mean", limit_tokens=1)
    result = b""
    for micro in micro_batches(batch, max_places=40, packed=packed):
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(micro.num_places, VOCAB, generator=generator)
        others = torch.ones(micro.num_places, dtype=torch.bool).index_fill(0, micro.predicts_n, False)
        if poison is not None:
            logits[others] = poison
        logits.requires_grad_()
        scores = score_tokens(
            lambda x: x, logits[micro.predicts_n], micro.token_ids_n, vocab_size=VOCAB, entropy_gradient=True
        )
        rollout = batch.logprobs_N[micro.index_n]
        inputs = PolicyInputs(
            scores.logprobs_n, rollout - 0.3, advantages[micro.index_n], weights[micro.index_n], micro.sequence_n,
            rollout_logprobs_n=rollout, ref_logprobs_n=rollout, entropy_n=scores.entropy_n,
        )  # fmt: skip
        loss, metrics = policy_loss(inputs, options)
        loss.backward()
        assert torch.equal(logits.grad[others], torch.zeros_like(logits.grad[others]))
        assert logits.grad[micro.predicts_n].abs().max() > 0
        result += loss.detach().numpy().tobytes() + logits.grad.numpy().tobytes()
        result += b"".join(metrics[key].numpy().tobytes() for key in sorted(metrics))
    return result
