"""A reward function for code: OpenRLHF's `--remote_rm_url` form, for one answer per prompt.

    # reward_func.py
    from agentenv_envs.code_sandbox.rewards import reward_func

    python -m openrlhf.cli.train_ppo_ray --remote_rm_url reward_func.py --label_key label …

The rewards are those of the guide to OpenRLHF's custom rewards: 1.0 when all tests pass, 0.3 when some do, 0.0 when
none does, -0.5 for a program that runs out of time, -1.0 for one that cannot be loaded or is none. The guide takes the
word "passed" in the output of pytest on the model's own file for a pass; here the tests are the label's, which the
program never sees, and each must be seen to pass. Where the sandbox fails there is no reward: it raises.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from typing import Any

from agentenv.errors import InfraError
from agentenv.sandbox.grading import GradeResult, Verdict
from agentenv_envs.code_sandbox.datasets import code_task
from agentenv_envs.code_sandbox.env import CodeSandbox
from agentenv_envs.code_sandbox.extract import extract_code
from agentenv_envs.code_sandbox.phases import grade_in_turn
from agentenv_envs.code_sandbox.pool import shared_sandbox

ALL_PASSED, SOME_PASSED, NONE_PASSED, TIMED_OUT, NOT_LOADED = 1.0, 0.3, 0.0, -0.5, -1.0


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any]) -> dict[str, Any]:
    """Rewards, scores in [0, 1] and logs, each a float tensor of shape [number of queries].

    Args:
        queries: prompt and answer, as one text each.
        prompts: the prompts alone.
        labels: the tests, in any form that `datasets` knows, as JSON.

    Raises:
        InfraError: the sandbox failed, so that nothing is known of a program.
        DataError: a label holds no tests.
    """
    import torch

    samples = list(zip(queries, prompts, labels, strict=True))
    results = _loop_thread().call(_graded([(query.removeprefix(prompt), label) for query, prompt, label in samples]))
    rewards = torch.tensor([_reward(result) for result in results])
    shares = torch.tensor([0.0 if result is None else result.score or 0.0 for result in results])
    correct = torch.tensor([float(result is not None and bool(result.all_passed)) for result in results])
    logs = {"code_correctness": rewards, "correct": correct, "passed_share": shares}
    return {"rewards": rewards, "scores": (rewards + 1.0) / 2.0, "extra_logs": logs}


def _reward(result: GradeResult | None) -> float:
    if result is None or result.load_error:
        return NOT_LOADED
    if result.all_passed:
        return ALL_PASSED
    if result.count(Verdict.PASSED):
        return SOME_PASSED
    return TIMED_OUT if result.count(Verdict.TIMEOUT) else NONE_PASSED


async def _graded(answers: Sequence[tuple[str, Any]]) -> list[GradeResult | None]:
    """A grade per answer, None for an answer without a program."""
    sandbox = await shared_sandbox()

    async def one(answer: str, label: Any) -> GradeResult | None:
        """The grade of an answer."""
        task, code = code_task(label), extract_code(answer)
        if code is None:
            return None
        limits = CodeSandbox.default_limits
        result = await grade_in_turn(
            sandbox, code, task.suite, limits=limits, all_or_nothing=False, tenant=f"{hash(code):x}"
        )
        if result.score is None:
            raise InfraError(f"reward_func: expected a grade, got none: {result.infra_detail or 'no detail'}. Retry.")
        return result

    return await asyncio.gather(*(one(answer, label) for answer, label in answers))


class _LoopThread:
    """An event loop in a thread, for a function that is called from threads and is not async itself.

    It ends with the process, and the sandbox that it holds ends as its owner does.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="code-rewards", daemon=True).start()

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of a coroutine, run there."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


_thread: _LoopThread | None = None
_making = threading.Lock()  # guards _thread: several threads may call first


def _loop_thread() -> _LoopThread:
    global _thread
    with _making:
        if _thread is None:
            _thread = _LoopThread()
        return _thread
