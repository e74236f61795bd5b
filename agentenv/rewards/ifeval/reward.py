"""Rewards a response for following the instructions of its prompt, as IFEval and open-instruct verify them."""

from __future__ import annotations

from collections.abc import Mapping

from agentenv.errors import ConfigError, InfraError
from agentenv.rewards._arguments import one_of
from agentenv.rewards.ifeval.instructions import MODES, Instruction, instructions_of, judged
from agentenv.rewards.pool import WorkerPool, WorkerTimeout, shared_pool
from agentenv.rewards.text import final_text
from agentenv.rewards.types import Response, RewardResult, Status

CREDITS = ("all", "fraction")
MAX_CHARS = 1_000_000
"""Longer answers are refused: cut, they would be other texts."""
_INLINE_CHARS = 2000
"""What is longer is judged in another process."""
_CPU_LIMIT_S = 20.0


class IFEvalReward:
    """Rewards the share of the row's instructions that the answer follows, or only all of them together.

    The answer is what stands behind the thinking. `mode` "strict" judges it as it is; "loose" takes the best of eight
    readings, as IFEval does (without its first or last line, without stars). `credit` "all" rewards 1 for following
    every instruction and else 0; "fraction" the share that it follows. The score is 1 where it follows all.

    The instructions are the label or the row's other columns, see `instructions_of`. Components: `followed` (share),
    `all` (0 or 1), `num_instructions`. Where langdetect is missing and an instruction needs it, the status is INFRA.

    Raises:
        ConfigError: `mode` or `credit` is none that there is.
    """

    bounds = (0.0, 1.0)

    def __init__(self, *, mode: str = "strict", credit: str = "all", pool: WorkerPool | None = None) -> None:
        self._mode = one_of("IFEvalReward.mode", mode, MODES)
        self._credit = one_of("IFEvalReward.credit", credit, CREDITS)
        if pool is not None and not isinstance(pool, WorkerPool):
            raise ConfigError(f"IFEvalReward.pool: expected a WorkerPool or None, got {pool!r}. Leave it out.")
        self._pool = pool

    async def grade(self, response: Response) -> RewardResult:
        """Which instructions the answer follows; the feedback names those that it does not, by id.

        Raises:
            DataError: the row holds no instructions, or one that cannot be read; it names the parameter.
        """
        instructions = instructions_of(response.label, response.metadata)
        text = final_text(response.text)
        if not text:
            return self._nothing(instructions, Status.NO_ANSWER, "no answer")
        if len(text) > MAX_CHARS:
            return self._nothing(instructions, Status.PARSE_ERROR, f"the answer has more than {MAX_CHARS} characters")
        try:
            return self._result(instructions, await self._judged(instructions, text))
        except WorkerTimeout as error:
            return self._nothing(instructions, Status.TIMEOUT, str(error))
        except InfraError as error:
            return RewardResult.failed(str(error))

    async def _judged(self, instructions: list[Instruction], text: str) -> list[bool]:
        if len(text) <= _INLINE_CHARS and not any(instruction.detects for instruction in instructions):
            return judged(instructions, text, self._mode)
        request = {
            "task": "ifeval",
            "text": text,
            "mode": self._mode,
            "instructions": [[instruction.name, dict(instruction.params)] for instruction in instructions],
        }
        reply = await (self._pool or shared_pool()).run(request, cpu_limit_s=_CPU_LIMIT_S)
        return [bool(followed) for followed in reply["followed"]]

    def _result(self, instructions: list[Instruction], followed: list[bool]) -> RewardResult:
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
    parts = {"followed": share, "all": float(all(followed)), "num_instructions": float(len(followed))}
    return parts
