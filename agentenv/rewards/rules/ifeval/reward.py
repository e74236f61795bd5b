"""Reward a response for following the instructions of its prompt, as IFEval and open-instruct verify them."""

from __future__ import annotations

from collections.abc import Mapping

from agentenv.core.arguments import one_of
from agentenv.errors import InfraError
from agentenv.rewards.rules.ifeval.instructions import MODES, Instruction, check_text, instructions_of
from agentenv.rewards.rules.text import final_text
from agentenv.rewards.types import Response, RewardResult, Status
from agentenv.rewards.workers.pool import WorkerTimeout, shared_pool

CREDITS = ("all", "fraction")
MAX_CHARS = 1_000_000
"""Longer answers are rejected; cutting them would change them."""
_INLINE_CHARS = 2000
"""Longer texts are checked in a worker process."""
_CPU_LIMIT_S = 20.0


class IFEvalReward:
    """The share of the row's instructions that the answer follows, or 1 only if it follows all.

    The answer is the text after the thinking. `mode` "strict" checks it unchanged; "loose" takes the best of eight
    variants, as IFEval does (without its first or last line, without stars). With `credit` "all" the reward is 1 for
    following every instruction, else 0; with "fraction" it is the share. The score is 1 if the answer follows all.

    The instructions are the label or the row's other columns, see `instructions_of`. Components: `followed` (share),
    `all` (0 or 1), `num_instructions`. If an instruction needs langdetect and it is missing, the status is INFRA.

    Raises:
        ConfigError: `mode` or `credit` is unknown.
    """

    bounds = (0.0, 1.0)

    def __init__(self, *, mode: str = "strict", credit: str = "all") -> None:
        self._mode = one_of("IFEvalReward.mode", mode, MODES)
        self._credit = one_of("IFEvalReward.credit", credit, CREDITS)

    async def grade(self, response: Response) -> RewardResult:
        """Return the result; the feedback lists the ids of instructions that the answer does not follow.

        Raises:
            DataError: the row has no instructions, or one that cannot be read; says which parameter is wrong.
        """
        instructions = instructions_of(response.label, response.metadata)
        text = final_text(response.text, response.prompt)
        if not text:
            return self._nothing(instructions, Status.NO_ANSWER, "no answer")
        if len(text) > MAX_CHARS:
            return self._nothing(instructions, Status.PARSE_ERROR, f"the answer has more than {MAX_CHARS} characters")
        try:
            if len(text) <= _INLINE_CHARS and not any(instruction.detects for instruction in instructions):
                followed = check_text(instructions, text, self._mode)
            else:
                asked = [[instruction.name, dict(instruction.params)] for instruction in instructions]
                request = {"task": "ifeval", "text": text, "mode": self._mode, "instructions": asked}
                reply = await shared_pool().run(request, cpu_limit_s=_CPU_LIMIT_S)
                followed = [bool(each) for each in reply["followed"]]
        except WorkerTimeout as error:
            return self._nothing(instructions, Status.TIMEOUT, str(error))
        except InfraError as error:
            return RewardResult.failed(str(error))
        components = _components(followed)
        missed = [each.type for each, is_followed in zip(instructions, followed, strict=True) if not is_followed]
        feedback = f"{sum(followed)} of {len(followed)} instructions followed"
        if missed:
            feedback += f"; not {', '.join(dict.fromkeys(missed))}"
        return RewardResult(
            components["all" if self._credit == "all" else "followed"],
            components["all"],
            components=components,
            feedback=feedback + ".",
        )

    def _nothing(self, instructions: list[Instruction], status: Status, why: str) -> RewardResult:
        components = _components([False] * len(instructions))
        return RewardResult(0.0, 0.0, status, components, feedback=f"No instruction followed: {why}.", detail=why)


def _components(followed: list[bool]) -> Mapping[str, float]:
    share = sum(followed) / len(followed)
    return {"followed": share, "all": float(all(followed)), "num_instructions": float(len(followed))}
