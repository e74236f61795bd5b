"""Run by a Python that has OpenRLHF: answers cases with its own functions. usage: openrlhf_arithmetic.py IN.pt OUT.pt

Its model package needs flash_attn and deepspeed, which the arithmetic does not: packages are entered by their path
alone, and what only starts actors is an empty module.
"""

import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import torch

FOLDER = Path(importlib.util.find_spec("openrlhf").submodule_search_locations[0])
for name in ("models", "trainer", "trainer.ppo_utils", "trainer.ray", "utils"):
    package = types.ModuleType(f"openrlhf.{name}")
    package.__path__ = [str(FOLDER / name.replace(".", "/"))]
    sys.modules[package.__name__] = package
deepspeed = types.ModuleType("deepspeed")
deepspeed.__spec__ = importlib.machinery.ModuleSpec("deepspeed", None)  # accelerate looks for it
sys.modules["deepspeed"] = deepspeed
launcher = types.ModuleType("openrlhf.trainer.ray.launcher")
launcher.RayActorGroup = object
sys.modules[launcher.__name__] = launcher

from openrlhf.models.loss import PolicyLoss, ValueLoss  # noqa: E402
from openrlhf.models.utils import compute_approx_kl  # noqa: E402
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker  # noqa: E402


def policy(options, log_probs, **tensors):
    log_probs = log_probs.clone().requires_grad_()
    loss, clip_ratio, ppo_kl, *_ = PolicyLoss(**options)(log_probs, **tensors)
    loss.backward()
    return {"loss": loss.detach(), "gradient": log_probs.grad, "clip_ratio": clip_ratio, "kl": ppo_kl}


def value(options, **tensors):
    return {"loss": ValueLoss(**options)(**tensors)}


def kl(options, log_probs, **tensors):
    log_probs = log_probs.clone().requires_grad_()
    value = compute_approx_kl(log_probs, **tensors, **options)
    value.sum().backward()
    return {"value": value.detach(), "gradient": log_probs.grad}


def advantages(options, rewards, action_mask, kl, values=None, n_samples_per_prompt=1):
    maker = RemoteExperienceMaker.__new__(RemoteExperienceMaker)
    maker.advantage_estimator = options["estimator"]
    maker.kl_ctl = SimpleNamespace(value=options.get("kl_coef", 0.0))
    settings = {"gamma": 1.0, "lambd": 1.0, "no_std_norm": False, **options}
    maker.args = SimpleNamespace(
        algo=SimpleNamespace(advantage=SimpleNamespace(**settings)),
        rollout=SimpleNamespace(n_samples_per_prompt=n_samples_per_prompt),
        reward=SimpleNamespace(clip_range=options.get("reward_clip")),
    )
    maker.strategy = SimpleNamespace(args=maker.args)
    experience = SimpleNamespace(
        index=list(range(len(rewards))), rewards=rewards, kl=kl, action_mask=action_mask, values=values, info={}
    )
    maker.compute_advantages_and_returns([experience])
    return {"advantages": experience.advantages, "returns": experience.returns}


def main():
    kinds = {"policy": policy, "value": value, "kl": kl, "advantages": advantages}
    cases = torch.load(sys.argv[1], weights_only=False)
    torch.save([kinds[kind](options, **tensors) for kind, options, tensors in cases], sys.argv[2])


if __name__ == "__main__":
    main()
