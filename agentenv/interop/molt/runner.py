"""AgentRunner: Molt's `execute` signature over `run_episode`, for the file that `--train.agent_path` names.

Source: molt/agents/base.py and molt/trainer/rollout/{router,samples_generator}.py, 0.1.6 and 0.2.1. What Molt shares
with OpenRLHF, such as the sample's fields, is imported from there. `files.py` runs Molt's own files here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

from agentenv._util.calls import call
from agentenv.core.agent import AgentInstance, ResetState
from agentenv.core.types import Completion, SamplingParams
from agentenv.episode.source import as_agent
from agentenv.errors import ConfigError, EngineError
from agentenv.interop.openrlhf.engine import LLMEngine, OpenRLHFEngine
from agentenv.interop.openrlhf.executor import AgentExecutor

_BASE = "molt.agents.base"


class AgentRunner(AgentExecutor):
    """Runs the episodes of one agent class in Molt. Subclass it in an agent file and name the class.

    The class attributes are those of `AgentExecutor`, with another default for failed episodes: they are raised, as
    Molt expects, which drops and counts them ("runner_error"; 0.1.6 only prints them).

    Example::

        class AgentRunner(AgentRunner):
            agent_cls = MathRetry
            logs = {"correct": "last"}
    """

    PRERENDER_PROMPT: ClassVar[bool] = False
    """False: Molt passes the row's messages, which are rendered here; needs `--data.apply_chat_template`. True: for a
    data set of plain text, or to let Molt render the messages; the environment then gets text."""
    on_error: ClassVar[Literal["mask", "raise"]] = "raise"
    """`mask`: a sample of one action token, as `AgentExecutor` describes it, so that the group keeps its size."""
    _one_sequence: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check the subclass's attributes; register it as a Runner if Molt is imported."""
        super().__init_subclass__(**kwargs)
        base: Any = getattr(sys.modules.get(_BASE), "Runner", None)
        if hasattr(base, "register"):
            base.register(cls)

    def __init__(self, agent_instance_cls: type | None = None) -> None:
        """Accept the class, or nothing, as Molt passes it."""
        super().__init__(agent_instance_cls)
        self._passes_messages = not self.PRERENDER_PROMPT
        if self.agent_instance_cls is not None:
            cls: Any = as_agent(self.agent_instance_cls)
            self.agent_instance_cls = _with_row_tools(cls)

    async def execute(
        self,
        prompt: Any,
        label: Any,
        sampling_params: Any,
        max_length: int | None = None,
        hf_tokenizer: Any = None,
        llm_engine: Any = None,
        images: Any = None,
        tools: Any = None,
    ) -> Any:
        """Run one episode and return Molt's Trajectory; a list of them if the history was rendered again.

        Raises:
            ConfigError: see `AgentExecutor.execute`; or Molt is not imported.
            InfraError: the episode failed.
        """
        if isinstance(llm_engine, LLMEngine):  # ours: `agentenv run --agent_func_path` called
            return await super().execute(prompt, label, sampling_params)
        if not images and hasattr(hf_tokenizer, "image_processor"):
            hf_tokenizer = hf_tokenizer.tokenizer  # a processor, but this row has text only
        call = self._foreign_call(prompt, label, max_length, hf_tokenizer, llm_engine, images)
        call.engine = engine = MoltEngine(llm_engine, sampling_params)
        if tools and not isinstance(prompt, str):  # Molt has rendered them into a text
            call.task = replace(call.task, metadata={"tools": tools})
        trajectory = await self._run_for_trainer(call, sampling_params)
        acted = sorted({turn.segment for turn in trajectory.turns}) or [0]
        samples = {index: self._sample(trajectory, sampling_params, call.chat, index) for index in acted}
        problem = next((problem for _, problem in samples.values() if problem is not None), None)
        await self._report(call, trajectory, next(iter(samples.values()))[0], problem)
        trajectory_cls: Any = getattr(sys.modules.get(_BASE), "Trajectory", None)
        if trajectory_cls is None:
            raise ConfigError(
                f"AgentRunner.execute: expected Molt to call it, got no module {_BASE}. Elsewhere use AgentExecutor."
            )
        # Molt counts an action that a limit cut in any turn, and an episode that a limit or the environment cut.
        is_cut = trajectory.truncated or any(turn.finish_reason == "length" for turn in trajectory.turns)
        facts = {"observation_text": "", "truncated": problem is None and is_cut}
        converted = [trajectory_cls(**{**response, **facts}) for response, _ in samples.values()]
        if problem is not None:
            return converted[0]
        for index, sample in zip(samples, converted, strict=True):
            # What the engine reported for each action; an aborted turn has an answer and no turn.
            paired = zip(trajectory.turns, engine.answers, strict=False)
            answers = [answer for turn, answer in paired if turn.segment == index]
            sample.off_policy_action_lens = [num_stale for _, num_stale in answers]
            for output, _ in answers:
                sample.absorb_routing(output)
            top_logprobs = [getattr(output.outputs[0], "top_logprobs", None) for output, _ in answers]
            if None not in top_logprobs:
                sample.rollout_top_logprobs = top_logprobs
        return converted[0] if len(converted) == 1 else converted


@functools.cache
def _with_row_tools(cls: Any) -> type[AgentInstance]:
    """Return the agent class with a `reset` that offers the tools of Molt's data row unless it names its own."""

    @functools.wraps(cls.reset)
    async def reset(self: AgentInstance, states: ResetState) -> Any:
        tools = states["metadata"].get("tools")
        answer = await call(partial(cls.reset, self), states)
        if not tools or not isinstance(answer, Mapping) or isinstance(answer.get("observation"), str):
            return answer
        return {"tools": tools, **answer}

    return type(cls.__name__, (cls,), {"reset": reset, "__module__": cls.__module__})


class MoltEngine(OpenRLHFEngine):
    """The engine behind one `execute` call of Molt: one conversation, whose requests all carry its session's id.

    A completion's policy versions count the weight updates during this episode: Molt reports only how many tokens at
    the start of an action are older than an update in the middle of it.
    """

    def __init__(self, llm_engine: Any, sampling_params: Any) -> None:
        super().__init__(llm_engine, sampling_params)
        self.answers: list[tuple[Any, int]] = []
        """Molt's answer for each turn, in order: the output, and the number of stale tokens at its start."""
        self._version = 0

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Sample one action; see `agentenv.core.engine.Engine`."""
        if request_id.endswith("/0"):  # the episode runs again from its first turn
            self.answers, self._version = [], 0
        completion = await super().generate(prompt_token_ids, sampling, request_id=request_id)
        num = len(completion.token_ids)
        old = min(self.answers[-1][1], num)
        before, self._version = self._version, self._version + (old > 0)
        versions = (*[before] * old, *[self._version] * (num - old))
        return replace(completion, policy_versions=versions, policy_version=self._version)

    async def _output(self, prompt: list[int], params: Any, request_id: str) -> Any:
        answer = await self._llm.generate(prompt, params, session_id=request_id.rpartition("/")[0])
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise EngineError(
                f"llm_engine.generate: expected (output, number of off-policy tokens), got {answer!r:.200}. "
                "Use the llm_engine that Molt hands to execute."
            )
        self.answers.append(answer)
        return answer[0]
