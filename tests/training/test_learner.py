"""A train step: closed forms, any split, memory that runs out, numbers that are none, going on bit for bit."""

import math
from dataclasses import replace

import pytest
import torch

from agentenv.errors import RunStopped
from agentenv.training.algorithm.batch import build
from agentenv.training.learner.learner import Learner, Totals, critic_micro_loss
from tests.training.worlds import batch_of, episode, flags, make_model


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def learner_of(path, *, num_train_steps=10, **changes):
    return Learner(flags(**changes), path, num_train_steps=num_train_steps, device="cpu")


def weights_of(learner):
    return {name: tensor.clone() for name, tensor in learner.weights()}


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


class Gradients(Learner):
    """Keeps the gradients of each optimizer step, and changes nothing."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.found = []
        self._adam.step = self._keep

    def _keep(self, factor):
        self.found.append({name: p.grad.clone() for name, p in self.policy.trained.items() if p.grad is not None})
        self._adam.clear()
        return factor


def gradients_of(path, batch, **changes):
    learner = Gradients(flags(max_norm=0.0, **changes), path, num_train_steps=10, device="cpu")
    metrics = learner.train_step(batch)
    return learner.found, metrics


# --- the gradient ----------


@pytest.mark.long
def test_a_reinforce_step_has_the_gradient_of_its_closed_form(path):
    """∇ = -1/N Σ A_t (onehot(a_t) - π_t)/T on the logits; here on a bias that is the only thing behind them."""
    batch = batch_of([[(2, 1.0)], [(3, -1.0)]])
    learner = Gradients(
        flags(advantage_estimator="reinforce", temperature=0.8, max_norm=0.0, no_advantage_std_norm=True),
        path, num_train_steps=1, device="cpu",
    )  # fmt: skip
    model = learner.policy.model
    bias = torch.nn.Parameter(torch.linspace(-1, 1, model.config.vocab_size))
    with torch.no_grad():
        model.lm_head.weight.zero_()
    model.lm_head.bias = bias
    learner.train_step(batch)
    probs = (bias / 0.8).softmax(-1)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0])
    advantages = advantages - advantages.mean()
    onehots = torch.nn.functional.one_hot(batch.token_ids_N, len(bias))
    expected = -(advantages[:, None] * (onehots - probs) / 0.8).mean(0)
    torch.testing.assert_close(bias.grad, expected.detach(), rtol=1e-5, atol=1e-7)


SPLITS = {
    "one at a time": {"micro_train_batch_size": 1},
    "two at a time": {"micro_train_batch_size": 2},
    "by tokens": {"use_dynamic_batch": True, "train_max_tokens_per_gpu": 20},
    "packed in twos": {"micro_train_batch_size": 2, "packing_samples": True},
    "packed": {"micro_train_batch_size": 8, "packing_samples": True},
    "packed by tokens": {"use_dynamic_batch": True, "train_max_tokens_per_gpu": 24, "packing_samples": True},
    "checkpointed": {"gradient_checkpointing": True, "micro_train_batch_size": 3},
}
SETTINGS = {
    "plain": {},
    "several steps, gspo": {"max_epochs": 2, "train_batch_size": 2, "policy_loss_type": "gspo"},
    "kl in the loss, entropy": {"init_kl_coef": 0.1, "use_kl_loss": True, "entropy_loss_coef": 0.05},
    "kl in the reward, by sample": {"init_kl_coef": 0.1, "loss_agg_mode": "seq-mean-token-mean"},
    "corrected": {"is_correction": "seq-mask-tis", "is_correction_threshold": (0.01, 100.0)},
    "gae": {"advantage_estimator": "gae", "lambd": 0.9},
}


@pytest.mark.long
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_gradient_does_not_depend_on_how_a_batch_is_split(path, setting):
    size = {"rollout_batch_size": 3, "n": 2}
    whole, metrics = gradients_of(path, batch_of(), micro_train_batch_size=8, **size, **SETTINGS[setting])
    largest = max(float(g.abs().max()) for g in whole[0].values())
    assert largest > 1e-3
    for split in SPLITS.values():
        parts, again = gradients_of(path, batch_of(), **size, **SETTINGS[setting], **split)
        assert len(parts) == len(whole)
        for part, step in zip(parts, whole, strict=True):
            for name, gradient in step.items():
                torch.testing.assert_close(part[name], gradient, rtol=1e-4, atol=1e-5 * largest)
        assert again == pytest.approx(metrics, rel=1e-4, abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("setting", sorted(SETTINGS))
def test_a_forced_token_reaches_no_loss(path, setting):
    """The last token of an action, which no other token reads, may be any one if a constraint forced it."""

    def gradients(token, *, forced):
        made = [episode([(3, 1.0)], seed=0, logprob=-4.5), episode([(4, 0.0)], seed=1, logprob=-4.5)]
        for each in made:
            last = each.turns[0].end - each.turns[0].start - 1
            each.turns[0].forced = (last,) if forced else ()
            each.segments[0].token_ids[-1] = token
            each.segments[0].logprobs[-1] = -token / 10
        return gradients_of(path, build(made), **SETTINGS[setting])

    (one, first), (two, second) = (gradients(token, forced=True) for token in (7, 40))
    assert first == second
    assert all(same(a, b) for a, b in zip(one, two, strict=True))
    assert first["num_tokens"] == 5
    chosen, _ = gradients(40, forced=False)
    assert not same(chosen[0], two[0])


@pytest.mark.long
def test_log_probabilities_under_a_constraint_are_no_difference_between_engine_and_learner(path):
    made = [episode([(3, 1.0)], seed=0), episode([(4, 0.0)], seed=1)]
    own = gradients_of(path, build(made))[1]["logprob_diff"]
    made[0].turns[0].forced = ()
    for place in range(made[0].turns[0].start, made[0].turns[0].end):
        made[0].segments[0].logprobs[place] = -50.0
    _, metrics = gradients_of(path, build(made))
    assert metrics["logprob_diff"] < own + 10.0
    for each in made:
        each.turns[0].forced = ()
    assert "logprob_diff" not in gradients_of(path, build(made))[1]


@pytest.mark.long
def test_old_log_probabilities_of_a_separate_pass_are_those_of_the_only_forward_pass(path):
    """A penalty of nearly 0 asks for the pass; the gradient is that without."""
    (one,), first = gradients_of(path, batch_of())
    (two,), second = gradients_of(path, batch_of(), init_kl_coef=1e-12)
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-7)
    assert second["clip_ratio"] == first["clip_ratio"] == 0.0
    assert second["logprob_diff"] == pytest.approx(first["logprob_diff"], rel=1e-5)


# --- steps and schedules ----------


@pytest.mark.long
def test_parts_of_a_step_are_its_episodes_shuffled_again_in_every_pass(path):
    learner = learner_of(path, max_epochs=2, train_batch_size=2, rollout_batch_size=3, n=2)
    parts = list(learner._parts(batch_of()))
    assert [len(part) for part in parts] == [2] * 6
    assert sorted(torch.cat(parts[:3]).tolist()) == sorted(torch.cat(parts[3:]).tolist()) == list(range(6))
    assert [p.tolist() for p in parts[:3]] != [p.tolist() for p in parts[3:]]
    assert learner.train_step(batch_of())["num_optimizer_steps"] == 6


@pytest.mark.long
@pytest.mark.parametrize("sizes", [[1], [5], [3, 3], [4, 3], [5, 4]])
def test_samples_left_by_failed_episodes_are_shared_evenly_without_a_step_on_a_remainder(path, sizes):
    learner = learner_of(path, train_batch_size=4, rollout_batch_size=4, n=2)
    batch = batch_of([[(2, 0.0)]] * sum(sizes))
    assert [len(part) for part in learner._parts(batch)] == sizes


def test_a_batch_of_nothing_changes_nothing_and_says_so(path):
    learner = learner_of(path, init_kl_coef=0.1)
    before = weights_of(learner)
    empty = build([])
    metrics = learner.train_step(empty)
    assert (metrics["num_tokens"], metrics["num_optimizer_steps"], learner.num_steps) == (0, 0, 1)
    assert all(math.isfinite(value) for value in metrics.values())
    assert same(before, weights_of(learner))
    dropped = build([episode([(2, 1.0)], logprob=math.nan)], need_logprobs=True)
    metrics = learner.train_step(dropped)
    assert (metrics["num_tokens"], metrics["num_dropped_tokens"]) == (0, 2)
    assert same(before, weights_of(learner))


def test_empty_batches_are_not_training(path):
    dropped = build([episode([(2, 1.0)], logprob=math.nan)], need_logprobs=True)
    learner = learner_of(path, is_correction="tis")
    for _ in range(2):
        learner.train_step(dropped)
    learner.train_step(batch_of())
    for _ in range(2):
        learner.train_step(dropped)
    with pytest.raises(RunStopped, match=r"train step 6: expected action tokens to learn from, got none .* 3 steps"):
        learner.train_step(dropped)
    assert learner.num_steps == 5


def test_a_step_is_whole_when_it_is_reported_and_not_before(path, monkeypatch):
    learner = learner_of(path)
    monkeypatch.setattr("agentenv.training.learner.learner.mismatch", lambda *_: 1 / 0)  # after the optimizer's step
    with pytest.raises(ZeroDivisionError):
        learner.train_step(batch_of())
    assert (learner.num_steps, learner.step_completed) == (0, False)


def test_later_optimizer_steps_are_held_against_the_policy_before_the_first(path):
    learner = learner_of(path, max_epochs=3, actor_learning_rate=0.05)
    old_N = learner._score_batch(batch_of(), Totals(), several=True).logprobs_N
    metrics = learner.train_step(batch_of())
    now_N = learner._score_batch(batch_of(), Totals(), several=True).logprobs_N
    assert metrics["clip_ratio"] > 0.05
    assert abs(metrics["approx_kl"]) > 1e-3
    assert metrics["logprob_diff"] == pytest.approx(float((old_N + 0.5).abs().mean()), rel=1e-5)
    assert (now_N - old_N).abs().max() > 0.1


def test_the_gradient_is_clipped_to_the_norm_that_is_asked_for(path):
    learner = Gradients(flags(max_norm=0.01), path, num_train_steps=1, device="cpu")
    metrics = learner.train_step(batch_of())
    clipped = torch.cat([g.flatten() for g in learner.found[0].values()]).norm()
    assert metrics["grad_norm"] > 0.02
    assert clipped == pytest.approx(0.01, rel=1e-3)


def test_the_learning_rate_follows_its_schedule_over_the_train_steps(path):
    learner = learner_of(path, num_train_steps=4, lr_scheduler="linear", lr_warmup_ratio=0.5)
    rates = [learner.train_step(batch_of([[(2, 1.0)], [(2, 0.0)]]))["learning_rate"] for _ in range(5)]
    assert rates == pytest.approx([x * 1e-2 for x in (1 / 3, 2 / 3, 1.0, 0.5, 0.0)])


@pytest.mark.long
@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_figures_per_token_do_not_depend_on_the_weight_of_a_token_in_the_loss(path, mode):
    """Episodes of one length: all modes weigh their tokens alike, and what a loss is divided by is nobody's entropy."""
    batch = batch_of([[(3, 1.0)], [(3, 0.0)]])
    options = {"init_kl_coef": 0.1, "max_epochs": 2, "actor_learning_rate": 1e-3, "is_correction": "icepop"}
    options |= {"is_correction_threshold": (0.01, 100.0)}
    told, other = (learner_of(path, loss_agg_mode=each, **options).train_step(batch) for each in ("token-mean", mode))
    for name in ("entropy", "kl", "approx_kl", "clip_ratio", "is_rejected"):
        assert other[name] == pytest.approx(told[name], rel=0.2, abs=1e-6), name
    assert told["entropy"] > 1.0
    assert abs(told["kl"]) > 1e-3


def test_without_engine_log_probabilities_their_difference_is_left_out(path):
    batch = build([episode([(2, 1.0)], logprob=math.nan), episode([(2, 0.0)], logprob=math.nan)])
    assert "logprob_diff" not in learner_of(path).train_step(batch)


# --- the critic ----------


@pytest.mark.long
def test_the_critic_learns_what_episodes_are_worth_while_the_policy_is_frozen(path):
    learner = learner_of(
        path, advantage_estimator="gae", freezing_actor_steps=15, critic_learning_rate=1e-2, value_clip=10.0
    )
    before, batch = weights_of(learner), batch_of([[(2, 1.0)], [(3, 1.0)], [(4, 0.0)], [(2, 0.0)]])
    losses = [learner.train_step(batch)["value_loss"] for _ in range(15)]
    assert losses[0] == pytest.approx(0.5 * 5 / 11)  # all values are 0: half the mean squared return
    assert losses[-1] < 0.1 * losses[0]
    assert same(before, weights_of(learner))
    metrics = learner.train_step(batch)
    assert {"policy_loss", "value_loss", "critic_grad_norm", "grad_norm"} <= metrics.keys()
    assert not same(before, weights_of(learner))


def test_flags_of_the_critic_reach_it(path, tmp_path, monkeypatch):
    other, clips = make_model(tmp_path / "other", seed=3), []
    monkeypatch.setattr(
        "agentenv.training.learner.learner.critic_micro_loss",
        lambda *args, clip, whole=critic_micro_loss: clips.append(clip) or whole(*args, clip=clip),
    )
    flags = {"critic_learning_rate": 0.0625, "value_clip": 0.75, "micro_train_batch_size": 8}
    learner = learner_of(path, advantage_estimator="gae", critic_pretrain=other, **flags)
    own = learner_of(path, advantage_estimator="gae").critic.backbone
    assert not torch.equal(next(own.parameters()), next(learner.critic.backbone.parameters()))
    learner.train_step(batch_of())
    assert (set(clips), learner._critic_adam._peak) == ({0.75}, 0.0625)


def test_episodes_that_were_cut_short_continue_being_worth_what_the_critic_says(path):
    batch = batch_of([[(2, 1.0)], [(3, 0.0)]])
    cut = replace(batch, truncated_E=torch.tensor([True, False]))
    learner = learner_of(path, advantage_estimator="gae")
    with torch.no_grad():
        learner.critic.head.bias.fill_(4.0)
    known = [learner._score_batch(b, Totals(), several=False) for b in (batch, cut)]
    assert known[0].values_N.tolist() == [4.0] * 5
    assert (known[1].returns_N - known[0].returns_N).tolist() == [4.0, 4.0, 0.0, 0.0, 0.0]


# --- memory ----------


def scarce(learner, places, *, kind, backward=False):
    """Let the model fail on more than so many tokens, on its way there or back."""
    calls = []

    def fail():
        raise kind("CUDA out of memory. Tried to allocate" if kind is not MemoryError else "")

    def forward(module, args, kwargs):
        calls.append(kwargs["input_ids"].numel())
        if not backward and calls[-1] > places:
            fail()

    def late(module, args, output):
        if backward and calls[-1] > places and output[0].requires_grad:
            (output[0] if isinstance(output, tuple) else output).register_hook(lambda gradient: fail())

    learner.policy.model.base_model.register_forward_pre_hook(forward, with_kwargs=True)
    learner.policy.model.base_model.layers[0].register_forward_hook(late)
    return calls


@pytest.mark.long
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("kind", "backward"),
    [(torch.OutOfMemoryError, False), (torch.OutOfMemoryError, True), (RuntimeError, True), (MemoryError, False)],
)
def test_a_micro_batch_that_does_not_fit_is_halved_and_the_step_is_the_same(path, caplog, kind, backward, packed):
    options = {"packing_samples": packed, "max_norm": 0.0, "micro_train_batch_size": 3}
    expected, _ = gradients_of(path, batch_of(), **{k: v for k, v in options.items() if k != "max_norm"})
    learner = Gradients(flags(**options), path, num_train_steps=10, device="cpu")
    scarce(learner, 25, kind=kind, backward=backward)
    metrics = learner.train_step(batch_of())
    assert metrics["num_oom_splits"] > 0
    assert "expected memory for a micro-batch of" in caplog.text
    for name, gradient in expected[0].items():
        torch.testing.assert_close(learner.found[0][name], gradient, rtol=1e-4, atol=1e-6)
    assert learner.train_step(batch_of())["num_oom_splits"] == 0  # smaller ones are kept


@pytest.mark.long
def test_passes_without_a_gradient_are_halved_too(path):
    learner = learner_of(path, init_kl_coef=0.1, micro_rollout_batch_size=6, micro_train_batch_size=1)
    scarce(learner, 25, kind=torch.OutOfMemoryError)
    assert learner.train_step(batch_of())["num_oom_splits"] > 0


def test_one_sequence_that_does_not_fit_stops_the_run(path):
    learner = learner_of(path)
    before = weights_of(learner)
    scarce(learner, 3, kind=torch.OutOfMemoryError)
    with pytest.raises(RunStopped, match="expected memory for one sequence of"):
        learner.train_step(batch_of())
    assert same(before, weights_of(learner))


@pytest.mark.long
def test_other_errors_are_not_taken_for_a_lack_of_memory(path):
    learner = learner_of(path)
    learner.policy.model.base_model.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        learner.train_step(batch_of())
    learner = learner_of(path)
    with pytest.raises(IndexError):
        learner.train_step(replace(batch_of(), sequences=tuple(s + 1000 for s in batch_of().sequences)))


# --- numbers that are none ----------


@pytest.mark.long
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("estimator", ["reinforce", "gae"])
def test_a_loss_or_gradient_that_is_not_a_number_stops_with_the_batch_saved_and_the_weights_as_they_were(
    path, tmp_path, value, estimator
):
    learner = learner_of(path, advantage_estimator=estimator)
    learner.failed_batch_path = tmp_path / "failed" / "batch.pt"
    learner.policy.model.base_model.layers[0].register_full_backward_hook(
        lambda module, inputs, outputs: tuple(g * value if g is not None else None for g in inputs)
    )
    before, critic = (
        weights_of(learner),
        learner.critic and {k: v.clone() for k, v in learner.critic.state_dict().items()},
    )
    batch = batch_of()
    with pytest.raises(RunStopped, match=r"train step 1: expected a finite loss and gradient, got .*batch\.pt"):
        learner.train_step(batch)
    assert same(before, weights_of(learner))
    if critic:
        assert same(critic, learner.critic.state_dict())
    saved = torch.load(learner.failed_batch_path, weights_only=True)
    assert saved["episode_ids"] == list(batch.episode_ids)
    assert torch.equal(saved["token_ids_N"], batch.token_ids_N)
    assert torch.equal(saved["tokens"]["rewards_N"], batch.tokens.rewards_N)
    assert saved["known"]["advantages_N"].shape == batch.token_ids_N.shape


@pytest.mark.long
def test_float16_that_overflows_skips_the_step_and_scales_less(path):
    learner = learner_of(path, param_dtype="fp16")
    before = weights_of(learner)
    broken = []
    handle = learner.policy.model.base_model.layers[0].register_full_backward_hook(
        lambda module, inputs, outputs: (
            broken.append(1) or tuple(g * math.inf if g is not None else None for g in inputs)
        )
    )
    scale = learner._adam._scale
    metrics = learner.train_step(batch_of())
    assert broken
    assert (metrics["num_skipped_steps"], learner._adam._scale) == (1, scale / 2)
    assert same(before, weights_of(learner))
    handle.remove()
    assert "num_skipped_steps" not in learner.train_step(batch_of())
    assert not same(before, weights_of(learner))


@pytest.mark.long
def test_float16_and_bfloat16_have_nearly_the_gradient_of_float32(path):
    (full,), _ = gradients_of(path, batch_of())
    joined = torch.cat([g.flatten() for g in full.values()])
    for dtype in ("bf16", "fp16"):
        learner = Gradients(flags(max_norm=0.0, param_dtype=dtype), path, num_train_steps=10, device="cpu")
        learner.train_step(batch_of())
        found = torch.cat([g.flatten() for g in learner.found[0].values()])
        assert torch.nn.functional.cosine_similarity(found, joined, dim=0) > 0.98
        assert found.norm() == pytest.approx(float(joined.norm()), rel=0.1)
        assert not torch.equal(found, joined), "computed in it"
        assert {p.dtype for p in learner.policy.trained.values()} == {torch.float32}


# --- going on ----------


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_epochs": 2, "train_batch_size": 2, "rollout_batch_size": 3, "n": 2},
        {"advantage_estimator": "gae", "lr_scheduler": "cosine"},
        {"lora_rank": 2, "lora_dropout": 0.3, "init_kl_coef": 0.1},
    ],
    ids=["plain", "several steps", "critic", "adapters with dropout"],
)
def test_a_learner_continues_bit_for_bit(path, tmp_path, changes):
    if "lora_rank" in changes:
        pytest.importorskip("peft")
    batches = [batch_of(), batch_of([[(3, 1.0)], [(2, 0.0), (1, 0.5)], [(4, 0.2)], [(1, 0.0)]])]
    learner = learner_of(path, **changes)
    learner.train_step(batches[0])
    torch.save(learner.state(), tmp_path / "state.pt")
    expected = [learner.train_step(batch) for batch in batches]
    resumed = learner_of(path, **changes)
    torch.randn(100)
    resumed.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert resumed.num_steps == 1
    assert [resumed.train_step(batch) for batch in batches] == expected
    assert same(weights_of(learner), weights_of(resumed))
