"""The same numbers as OpenRLHF 0.11.2's own functions, where these are right.

Its tensors are padded [B, T] with a mask, ours hold the action tokens alone: `flat` goes from one to the other.
"""

from pathlib import Path

import pytest
import torch

from agentenv.training.algorithm.advantages import ActionTokens, AdvantageOptions, estimate
from agentenv.training.algorithm.corrections import CorrectionOptions
from agentenv.training.algorithm.losses import (
    LossOptions,
    PolicyInputs,
    kl_estimate,
    policy_loss,
    token_weights,
    value_loss,
)
from tests.with_openrlhf.where import needs_openrlhf, python

pytestmark = [pytest.mark.slow, needs_openrlhf]

MASK = torch.tensor(
    [[1, 1, 0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0, 0], [0, 1, 0, 1, 0, 1, 0, 1], [1, 0, 0, 1, 1, 1, 1, 1]]
)
"""Two turns, one turn and padding, turns of one token, two turns."""
ROW = MASK.nonzero()[:, 0]
TURN = torch.tensor([0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 2, 3, 0, 1, 1, 1, 1, 1])


def normal(seed, scale=1.0):
    return torch.randn(MASK.shape, generator=torch.Generator().manual_seed(seed)) * scale


LOGPROBS, OLD, ROLLOUT = -1 - normal(1).abs(), -1 - normal(2).abs(), -1 - normal(3).abs()
ADVANTAGES, VALUES, RETURNS = normal(4), normal(5), normal(6)
REWARDS, GROUPS = torch.tensor([1.0, 0.25, -0.5, 2.0]), torch.tensor([0, 0, 1, 1])


def flat(tensor):
    return tensor[MASK.bool()]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parity")
    torch.save([case[:3] for case in CASES.values()], folder / "in.pt")
    python(Path(__file__).with_name("openrlhf_arithmetic.py"), folder / "in.pt", folder / "out.pt")
    return dict(zip(CASES, torch.load(folder / "out.pt", weights_only=False), strict=True))


def policy_case(theirs, ours, aggregation="token-mean", advantages=ADVANTAGES):
    theirs = {"token_level_loss": aggregation == "token-mean", **theirs}
    tensors = {
        "log_probs": LOGPROBS, "old_log_probs": OLD, "advantages": advantages, "action_mask": MASK,
        "rollout_log_probs": ROLLOUT,
    }  # fmt: skip
    return ("policy", theirs, tensors, ours, aggregation)


def advantage_case(estimator, ours=None, theirs=None, values=None):
    theirs = {"estimator": estimator, "kl_coef": 0.1, "reward_clip": (-10, 10), **(theirs or {})}
    tensors = {"rewards": REWARDS, "action_mask": MASK, "kl": KL * MASK, "values": values, "n_samples_per_prompt": 2}
    options = {"estimator": estimator, "kl_coef": 0.1, "reward_clip": (-10, 10), **(ours or {})}
    return ("advantages", theirs, tensors, AdvantageOptions(credit="episode", decay_per="token", **options))


KL = normal(7, 0.3)
BAND = {"is_correction_threshold": (0.5, 2.0)}
POLICY = {
    "ppo": policy_case({}, LossOptions()),
    "ppo, per sequence": policy_case({}, LossOptions(), "seq-mean-token-mean"),
    "asymmetric": policy_case({"clip_eps_low": 0.1, "clip_eps_high": 0.4}, LossOptions(clip_low=0.1, clip_high=0.4)),
    "dual clip": policy_case({"dual_clip": 1.5}, LossOptions(dual_clip=1.5)),
    "gspo": policy_case(
        {"policy_loss_type": "gspo"},
        LossOptions("gspo"),
        "seq-mean-token-mean",
        ADVANTAGES[:, :1].expand_as(MASK).clone(),
    ),
    "tis": policy_case(
        {"is_correction_level": "token", "is_correction_mode": "clip", **BAND},
        LossOptions(correction=CorrectionOptions("token", "clip", low=0.5, high=2.0)),
    ),
    "icepop": policy_case(
        {"is_correction_level": "token", "is_correction_mode": "mask", **BAND},
        LossOptions(correction=CorrectionOptions("token", "mask", low=0.5, high=2.0)),
    ),
    "sequence mask": policy_case(
        {"is_correction_level": "seq", "is_correction_mode": "mask", **BAND},
        LossOptions(correction=CorrectionOptions("sequence", "mask", low=0.5, high=2.0, truncate=False)),
    ),
}
ADVANTAGE = {
    "reinforce": advantage_case("reinforce"),
    "reinforce, mean only": advantage_case("reinforce", {"scale": False}, {"no_std_norm": True}),
    "reinforce_baseline": advantage_case("reinforce_baseline"),
    "rloo": advantage_case("rloo"),
    "group_norm": advantage_case("group_norm"),
    "dr_grpo": advantage_case("dr_grpo"),
    "flash_reinforce": advantage_case("flash_reinforce"),
    "gae, λ 1": advantage_case("gae", {"scale": False}, {"no_std_norm": True}, values=VALUES),
    "clipped": advantage_case("dr_grpo", {"reward_clip": (-0.3, 0.3)}, {"reward_clip": (-0.3, 0.3)}),
}
KLS = {
    f"{kind}, unbiased {unbiased}": (
        "kl", {"kl_estimator": kind, "unbiased_gradient": unbiased},
        {"log_probs": LOGPROBS * 4, "log_probs_base": OLD, "log_probs_old": ROLLOUT},
    )
    for kind in ("k1", "k2", "k3") for unbiased in (False, True)
}  # fmt: skip
VALUE = {
    f"value, clip {clip}": (
        "value", {"clip_eps": clip},
        {"values": VALUES, "old_values": OLD, "returns": RETURNS, "action_mask": MASK},
    )
    for clip in (None, 0.2)
}  # fmt: skip
CASES = POLICY | ADVANTAGE | KLS | VALUE


@pytest.mark.parametrize("name", POLICY)
def test_policy_losses_and_their_gradients_are_openrlhfs(name, answers):
    _, _, tensors, options, aggregation = CASES[name]
    logprobs = flat(LOGPROBS).requires_grad_()
    inputs = PolicyInputs(
        logprobs,
        flat(OLD),
        flat(tensors["advantages"]),
        token_weights(ROW, aggregation, limit_tokens=1),
        ROW,
        rollout_logprobs_n=flat(ROLLOUT),
    )
    loss, metrics = policy_loss(inputs, options)
    loss.backward()
    torch.testing.assert_close(loss, answers[name]["loss"])
    torch.testing.assert_close(logprobs.grad, flat(answers[name]["gradient"]), rtol=1e-5, atol=1e-7)
    assert logprobs.grad.any()
    if aggregation == "token-mean":
        torch.testing.assert_close(metrics["approx_kl"], answers[name]["kl"])
        if options.dual_clip is None:
            torch.testing.assert_close(metrics["clip_ratio"], answers[name]["clip_ratio"])
        else:  # OpenRLHF does not count the tokens whose gradient the dual clip takes
            assert metrics["clip_ratio"] > answers[name]["clip_ratio"]


def ours(name):
    _, _, tensors, options = CASES[name]
    ends = torch.cat([ROW[1:] != ROW[:-1], torch.tensor([True])])
    rewards = torch.zeros(len(ROW), dtype=torch.float64)
    rewards[ends] = tensors["rewards"].double()
    tokens = ActionTokens(ROW, TURN, rewards, GROUPS)
    values = None if tensors["values"] is None else flat(tensors["values"])
    return estimate(tokens, options, kl_N=flat(KL), values_N=values)


@pytest.mark.parametrize("name", ADVANTAGE)
def test_advantages_are_openrlhfs(name, answers):
    kind = "returns" if name == "gae, λ 1" else "advantages"
    torch.testing.assert_close(getattr(ours(name), f"{kind}_N"), flat(answers[name][kind]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", KLS)
def test_kl_estimates_and_their_gradients_are_openrlhfs(name, answers):
    _, options, tensors = CASES[name]
    logprobs = tensors["log_probs"].clone().requires_grad_()
    value = kl_estimate(
        logprobs, OLD, options["kl_estimator"], old_logprobs_n=ROLLOUT, unbiased_gradient=options["unbiased_gradient"]
    )
    value.sum().backward()
    torch.testing.assert_close(value, answers[name]["value"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logprobs.grad, answers[name]["gradient"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", VALUE)
def test_value_losses_are_openrlhfs(name, answers):
    loss = value_loss(flat(VALUES), flat(OLD), flat(RETURNS), clip=CASES[name][1]["clip_eps"])
    torch.testing.assert_close((loss * token_weights(ROW, "token-mean", limit_tokens=1)).sum(), answers[name]["loss"])
