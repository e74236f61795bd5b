"""AgentRunner: Molt's `execute` signature over `run_episode`, for the file that `--train.agent_path` names.

Source: molt/agents/base.py and molt/trainer/rollout/{router,samples_generator}.py, 0.1.6 and 0.2.1. What Molt shares
with OpenRLHF, the sample's fields above all, is taken from there; `molt_files.py` is the other way round.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

from agentenv.agent import AgentInstance, ResetState, ResponseDict, as_agent, call
from agentenv.engines.openrlhf import LLMEngine, OpenRLHFEngine
from agentenv.errors import ConfigError, EngineError
from agentenv.executor import AgentExecutor
from agentenv.trajectory import Trajectory
from agentenv.types import Completion, SamplingParams

_BASE = "molt.agents.base"


class AgentRunner(AgentExecutor):
    """Runs the episodes of one agent class in Molt; subclass it in an agent file and name the class.

    All that `AgentExecutor` lets a class say holds here, but for what becomes of a failed episode: raised, as Molt has
    it, it is dropped and counted there ("runner_error"; until 0.1.6 only printed).

    Example::

        class AgentRunner(AgentRunner):
            agent_cls = MathRetry
            logs = {"correct": "last"}
    """

    PRERENDER_PROMPT: ClassVar[bool] = False
    """Molt hands over the row's messages, which are rendered here, once: needs `--data.apply_chat_template`. True for
    a data set of plain text, or to have Molt render them; the environment is given text then."""
    on_error: ClassVar[Literal["mask", "raise"]] = "raise"
    """mask: a sample of one action token with `failed_reward`, so that the group keeps its size."""
    _one_sequence: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """As AgentExecutor; Molt, where it is imported, accepts the class as a Runner of its own."""
        super().__init_subclass__(**kwargs)
        base: Any = getattr(sys.modules.get(_BASE), "Runner", None)
        if hasattr(base, "register"):
            base.register(cls)

    def __init__(self, agent_instance_cls: type | None = None) -> None:
        """Take the class, or none: Molt gives nothing."""
        super().__init__(agent_instance_cls)
        if self.agent_instance_cls is not None:
            cls: Any = as_agent(self.agent_instance_cls)
            self.agent_instance_cls = _offering(cls)

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
        """Run one episode and return Molt's Trajectory; a list of them where a history was rendered anew.

        Raises:
            ConfigError: as AgentExecutor, or Molt is not imported.
            InfraError: the episode failed.
        """
        if isinstance(llm_engine, LLMEngine):  # ours, which `agentenv run --agent_func_path` hands over
            return await super().execute(prompt, label, sampling_params)
        if not images and hasattr(hf_tokenizer, "image_processor"):
            hf_tokenizer = hf_tokenizer.tokenizer  # a processor, though this row has text only
        call = self._call(prompt, label, max_length, hf_tokenizer, llm_engine, images)
        call.engine = engine = MoltEngine(llm_engine, sampling_params)
        if tools and not isinstance(prompt, str):  # Molt has rendered them into a text
            call.task = replace(call.task, metadata={"tools": tools})
        trajectory = await self._run_for_trainer(call, sampling_params)
        acted = sorted({turn.segment for turn in trajectory.turns}) or [0]
        samples = {index: self._sample(trajectory, sampling_params, call.chat, index) for index in acted}
        problem = next((problem for _, problem in samples.values() if problem is not None), None)
        self._note(trajectory, problem)
        if problem is not None:
            return _trajectory_class()(**samples[acted[0]][0], observation_text="")
        made = [_as_molts(response, trajectory, index, engine) for index, (response, _) in samples.items()]
        return made[0] if len(made) == 1 else made


@functools.cache
def _offering(cls: Any) -> type[AgentInstance]:
    """The same agent; where its `reset` names no tools, the model is offered those of Molt's data row."""

    @functools.wraps(cls.reset)
    async def reset(self: AgentInstance, states: ResetState) -> Any:
        """Reset, and add the row's tools."""
        tools = states["metadata"].get("tools")
        given = await call(partial(cls.reset, self), states)
        if not tools or not isinstance(given, Mapping) or isinstance(given.get("observation"), str):
            return given
        return {"tools": tools, **given}

    return type(cls.__name__, (cls,), {"reset": reset, "__module__": cls.__module__})


class MoltEngine(OpenRLHFEngine):
    """The engine behind one `execute` call of Molt: one conversation, whose requests all have its session's id.

    A completion's policy versions count the weight updates that this episode saw: Molt tells only how many tokens at an
    action's beginning are older than one that happened in the middle of it.
    """

    def __init__(self, llm_engine: Any, sampling_params: Any) -> None:
        super().__init__(llm_engine, sampling_params)
        self.answers: list[tuple[Any, int]] = []
        """Molt's own, one for each turn in their order: the output, and how many tokens at its beginning are stale."""
        self._version = 0

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Sample one action; see `agentenv.agent.Engine`."""
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


def _trajectory_class() -> Any:
    cls = getattr(sys.modules.get(_BASE), "Trajectory", None)
    if cls is None:
        raise ConfigError(
            f"AgentRunner.execute: expected Molt to call it, got no module {_BASE}. Elsewhere use AgentExecutor."
        )
    return cls


def _as_molts(response: ResponseDict, trajectory: Trajectory, segment_index: int, engine: MoltEngine) -> Any:
    """Molt's Trajectory of a segment: OpenRLHF's fields, and what its engine told of each action beside the tokens."""
    paired = zip(trajectory.turns, engine.answers, strict=False)  # one that was aborted has an answer and no turn
    answers = [answer for turn, answer in paired if turn.segment == segment_index]
    made = _trajectory_class()(**response, observation_text="")
    made.off_policy_action_lens = [num_stale for _, num_stale in answers]
    for output, _ in answers:
        made.absorb_routing(output)
    likeliest = [getattr(output.outputs[0], "top_logprobs", None) for output, _ in answers]
    if None not in likeliest:
        made.rollout_top_logprobs = likeliest
    return made
