"""verifiers' own Trace reads our records; prints as JSON what it made of the golden example, and of environments.

Its clients of a paid service, which importing verifiers imports, are replaced by stand-ins: a trace needs none of them.
"""

import importlib.abc
import importlib.machinery
import json
import sys
from unittest.mock import MagicMock

SERVICES = ("prime_sandboxes", "prime_tunnel", "prime_runs")


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports any module of the services as a stand-in."""

    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in SERVICES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__ = [], spec
        return module

    def exec_module(self, module):
        """Nothing."""


sys.meta_path.insert(0, StandIns())

import verifiers.v1 as vf  # noqa: E402

from agentenv import rollout  # noqa: E402
from agentenv.engines.models import load_tokenizer, resolve_model  # noqa: E402
from agentenv.interop.verifiers import from_records, to_records  # noqa: E402
from tests.interop.test_records import decode, golden  # noqa: E402

ENVIRONMENTS = ("math_retry", "tool_use", "guess_number")


def compared(trajectory, decode):
    """What verifiers reads in our record of an episode, beside the trajectory."""
    (record,) = to_records(trajectory, decode=decode)
    trace = vf.WireTrace.model_validate({**record, "agent": {"config": {}}})
    (back,) = from_records([trace.model_dump(mode="python")])
    (own,) = from_records([record])
    segment = trajectory.segments[0]
    (branch,) = trace.branches
    size = len(branch.token_ids)
    return {
        "reward": trace.reward,
        "ok": trace.ok,
        "num_turns": trace.num_turns,
        "same_tokens": branch.token_ids == segment.token_ids[:size].tolist(),
        "same_mask": branch.sampled_mask == [bool(one) for one in segment.action_mask[:size]],
        "same_logprobs": branch.logprobs == segment.logprobs[:size].tolist(),
        "same_reward": trace.reward == trajectory.reward,
        "roles": [message.role for message in branch.messages],
        "read_back": back == own,
        "num": size,
        "num_left": len(segment.token_ids) - size,
        "num_after": len(segment.token_ids) - trajectory.turns[-1].end,
    }


def main():
    tokenizer = load_tokenizer(resolve_model("tiny-math"))
    played = {
        env: rollout(env, model="tiny-math", engine="hf", n=4, limit=2, max_turns=2, max_tokens=32).trajectories
        for env in ENVIRONMENTS
    }
    print(
        json.dumps(
            {
                "golden": [compared(golden(), decode)],
                **{env: [compared(each, tokenizer.decode) for each in made] for env, made in played.items()},
            }
        )
    )


main()
