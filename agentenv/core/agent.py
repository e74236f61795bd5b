"""AgentInstance, the class that environments subclass, and the dicts that its methods receive and return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypedDict

from agentenv.core.step_dict import StepDict
from agentenv.core.tool_calls import ParsedAction
from agentenv.core.types import Message, StepResult
from agentenv.errors import DataError


class ResetState(TypedDict, total=False):
    """The dict that `reset` receives as `states`, and returns with the first observation. A method needs no annotation.

    OpenRLHF's keys come first.
    """

    observation: str | Sequence[Message]
    """The task's prompt: messages for the model's chat template, or text, which the policy continues without one."""
    label: Any
    metadata: Mapping[str, Any]
    images: tuple[Any, ...]
    seed: int | None
    """Seed of this episode's environment, the same if the episode is run again."""
    renders_tools: bool
    """Input only: True if the model's chat template renders `tools`."""
    tools: Sequence[Mapping[str, Any]]
    """Output only: schemas of the tools to offer, which the template renders before the first messages."""


class StepState(TypedDict, total=False):
    """The dict that `step` receives as `states`: OpenRLHF's four keys, then further ones. It needs no annotation."""

    observation_text: str
    """All text before the action; each piece was decoded when it was added."""
    action_text: str
    """The action, decoded from its ids, without the final terminator."""
    label: Any
    sampling_params: Any
    action_ids: list[int]
    """The sampled ids, unchanged; empty with an API model."""
    finish_reason: str
    """stop, length, abort, error or repetition."""
    turn_index: int
    """0 on the first turn."""
    tokens_left: int
    """Tokens left in `Limits.max_length` after this action."""
    metadata: Mapping[str, Any]
    seed: int | None
    tool_calls: ParsedAction
    """If the prompt was messages: the action with its tool calls and the malformed ones."""


class AgentInstance:
    """The environment's side of one episode: created for the episode, and closed after it.

    Write `step`; override the others if needed. Every method may be `async` or plain; plain methods and the
    constructor run in threads, so that a slow one never blocks the engine: make what belongs to its thread, such as a
    connection of sqlite3, where it is used. The constructor takes the arguments of `--env_kwargs`; slow work belongs in
    `reset`.

    Example::

        class Echo(AgentInstance):
            async def step(self, states):
                return StepResult(reward=float(states["action_text"] == states["label"]), terminated=True)
    """

    datasets: ClassVar[Mapping[str, str | Path]] = {}
    """Data included with the environment, by the name for `--data`; the first is the default."""
    needs_label: ClassVar[bool] = True
    """False if the environment needs no labels: rows without the column `label`, or with null in it, then have None."""
    max_turns: ClassVar[int | None] = None
    """Maximum number of turns that an episode needs: the default of `Limits.max_turns`; None keeps that unchanged."""
    max_length: ClassVar[int | None] = None
    """Maximum number of tokens that an episode needs: the default of `Limits.max_length`; None keeps that unchanged."""
    score_range: ClassVar[tuple[float, float] | None] = (0.0, 1.0)
    """Lowest and highest score. A score outside it is an error of the episode; None allows every finite number."""
    cpu_bound: ClassVar[bool] = False
    """True if the methods compute in Python, which threads do not speed up: `run`, `train` and the vector environment
    then play the environment in processes, one per core (`--env_actors`). Arguments and results must be picklable."""
    hacks: ClassVar[Mapping[str, str | Sequence[str]]] = {}
    """Actions by name that try to earn a reward without solving the task: a text, which is repeated in each turn, or a
    list of texts, whose last is. `agentenv audit` plays them; none may earn a full score."""

    async def reset(self, states: ResetState) -> ResetState:
        """Return the first observation under the key `observation`; by default the task's prompt.

        `states` is a dict with observation (the task's prompt), label, metadata, images, seed and renders_tools. Return
        it, or a dict with the key `observation`, messages or a text without a chat template, and with `tools`, schemas
        of tools to offer.

        Raises:
            DataError: the task has images, which engines do not take, and the environment has no `reset` that reads
                them.
        """
        cls, images = type(self), states.get("images", ())
        if images and cls.reset is AgentInstance.reset:
            raise DataError(
                f"{cls.__name__}.reset: expected a task without images, because engines take text, got {len(images)}. "
                "Write a reset that describes them, or drop the row's column 'images'."
            )
        return states

    async def step(self, states: StepState) -> StepResult | StepDict:
        """Grade an action and reply to it.

        `states` is a dict with action_text (the action), label, metadata, turn_index, seed, tool_calls,
        observation_text, action_ids, finish_reason, tokens_left and sampling_params. Return a StepResult.
        """
        raise NotImplementedError(f"{type(self).__name__}.step: expected an implementation, got none. Write `step`.")

    async def on_truncate(self, states: StepState) -> StepResult | StepDict | None:
        """Return a last result when a limit ends the episode, or None.

        Its reward is added to the last turn's, its score replaces that turn's, and its observation is ignored. `states`
        are those of the last step.
        """
        return None

    async def gold(self, states: StepState) -> str | None:
        """Return an action that earns the full score now; None if the environment has none. Policies never see it.

        `agentenv check` and `audit` play it, and so do `/gold!` in `agentenv play` and a test by `episode.gold()` of
        `env.stepped()`. `states` has observation_text, label, turn_index, metadata and seed.
        """
        return None

    async def close(self) -> None:
        """Release the episode's resources. Always called, exactly once; waits up to 5 s for threads of plain tools."""
