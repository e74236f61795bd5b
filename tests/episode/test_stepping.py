"""An episode whose actions are given one at a time is an episode of the one loop."""

import asyncio
from functools import partial

import pytest

from agentenv._util.calls import create
from agentenv.chat.chat import Chat
from agentenv.chat.encoding import encoder_of
from agentenv.core.agent import AgentInstance
from agentenv.core.types import Completion, Limits, SamplingParams, StepResult, StopReason, Task
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.loop import run_episode
from agentenv.episode.setup import EpisodeKey
from agentenv.episode.stepping import SteppedEpisode
from agentenv.errors import ContractError, EpisodeFailed, InfraError
from agentenv.testing.tokenizers import ByteFallbackTokenizer, CharTokenizer, MergingTokenizer

LIMITS = Limits(max_length=4_000, max_turns=4)
TASK = Task([{"role": "user", "content": "Say yes."}], "yes", task_id="t")


class Yes(AgentInstance):
    """Over when the action is the label; says what it heard."""

    def __init__(self, last_word=None):
        self.last_word, self.closed = last_word, 0

    async def step(self, states):
        said = states["action_text"]
        done = said == states["label"]
        return StepResult(f"I heard {said!r}.", reward=float(done), terminated=done, score=float(done))

    async def on_truncate(self, states):
        return None if self.last_word is None else StepResult(reward=self.last_word)

    async def close(self):
        self.closed += 1

    def gold(self, states):
        return states["label"] if states["turn_index"] else "not yet"


class ClosesSlowly(Yes):
    async def close(self):
        await asyncio.sleep(0.01)
        self.closed += 1


class Raises(Yes):
    async def step(self, states):
        raise RuntimeError("no")


def stepped(cls=Yes, kwargs=None, *, limits=LIMITS, sampling=None, task=TASK, tokenizer=None, made=None):
    async def make():
        instance = await create(cls, kwargs or {})
        if made is not None:
            made.append(instance)
        return instance

    chat = Chat(tokenizer or CharTokenizer())
    return SteppedEpisode(make, task, chat=chat, sampling=sampling, limits=limits, key=EpisodeKey("t/0", seed=7))


@pytest.mark.parametrize("tokenizer", [CharTokenizer, MergingTokenizer, ByteFallbackTokenizer])
@pytest.mark.parametrize("actions", [["yes"], ["no", "yes"], ["", "é 漢 <|im_end|>", "yes"], ["no"] * 4])
async def test_it_is_the_episode_that_an_engine_would_have_made(tokenizer, actions):
    episode = stepped(tokenizer=tokenizer())
    assert await episode.begin() == TASK.prompt
    for action in actions:
        assert not episode.over
        result = await episode.act(action)
        assert episode.trajectory.turns[-1].action == action
    assert episode.over
    assert result.done
    chat = Chat(tokenizer())
    script = [(*encoder_of(chat.tokenizer).plain(action), chat.tokenizer.eos_token_id) for action in actions]
    same = await run_episode(
        partial(create, Yes, {}), TASK, engine=ScriptedEngine(script, chat.tokenizer), chat=chat,
        sampling=SamplingParams(), limits=LIMITS, key=EpisodeKey("t/0", seed=7),
    )  # fmt: skip
    other = episode.trajectory
    assert (other.token_ids, other.action_mask, other.reward) == (same.token_ids, same.action_mask, same.reward)
    assert (other.stop_reason, other.segments[0].rewards) == (same.stop_reason, same.segments[0].rewards)
    assert other.seed == 7


async def test_token_ids_are_taken_as_they_are_and_cut_where_room_ends():
    async with stepped(sampling=SamplingParams(max_tokens=3)) as episode:
        await episode.begin()
        assert list(episode.asked.prompt_token_ids) == list(episode.trajectory.token_ids)
        await episode.act([100, 101, 0])
        assert episode.trajectory.turns[-1].finish_reason == "stop"
        await episode.act([100, 101, 102, 103])
        turn = episode.trajectory.turns[-1]
        assert (turn.finish_reason, turn.end - turn.start) == ("length", 3)
        await episode.act(Completion((100,), "stop", logprobs=(-1.0,)))
        assert list(episode.trajectory.logprobs)[turn.end :].count(-1.0) == 1
        with pytest.raises(ContractError, match="at least one token id"):
            await episode.act([])


async def test_a_failure_is_raised_and_closes_the_environment():
    made = []
    episode = stepped(Raises, made=made)
    await episode.begin()
    with pytest.raises(EpisodeFailed, match=r"step: RuntimeError: no at .*test_stepping\.py:\d+"):
        await episode.act("yes")
    assert episode.over
    assert made[0].closed == 1
    assert episode.trajectory.reward is None
    with pytest.raises(ContractError, match="that is over"):
        await episode.act("yes")


async def test_a_service_that_is_down_may_be_back_later():
    class Down(Yes):
        async def reset(self, states):
            raise InfraError("down.")

    with pytest.raises(
        EpisodeFailed, match=r"InfraError: down\. .* A service may be back later: play the episode again"
    ):
        await stepped(Down).begin()


async def test_it_begins_once_and_before_it_acts():
    async with stepped() as episode:
        with pytest.raises(ContractError, match="has not started"):
            await episode.act("yes")
        await episode.begin()
        with pytest.raises(ContractError, match="has started"):
            await episode.begin()


@pytest.mark.parametrize("num_actions", [0, 1])
async def test_closing_in_the_middle_closes_the_environment_once_and_leaves_no_task(num_actions):
    made = []
    episode = stepped(made=made)
    await episode.begin()
    for _ in range(num_actions):
        await episode.act("no")
    await episode.aclose()
    await episode.aclose()
    assert made[0].closed == 1
    assert episode.trajectory.stop_reason is StopReason.ABORTED
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_cancelling_an_act_closes_the_environment():
    class Slow(ClosesSlowly):
        async def step(self, states):
            await asyncio.sleep(60)

    made = []
    episode = stepped(Slow, made=made)
    await episode.begin()
    acting = asyncio.create_task(episode.act("no"))
    await asyncio.sleep(0.02)
    acting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await acting
    await episode.aclose()
    assert made[0].closed == 1


async def test_a_second_action_is_refused_while_the_first_is_at_work():
    class Slow(Yes):
        async def step(self, states):
            await asyncio.sleep(0)
            return await super().step(states)

    async with stepped(Slow) as episode:
        await episode.begin()
        acting = asyncio.create_task(episode.act("no"))
        await asyncio.sleep(0)
        with pytest.raises(ContractError, match=r"got one that works on an action\. Await that"):
            await episode.act("yes")
        assert (await acting).reward == 0.0


async def test_a_close_that_is_cancelled_raises_and_the_environment_is_closed_anyway():
    made = []
    episode = stepped(ClosesSlowly, made=made)
    await episode.begin()
    closing = asyncio.create_task(episode.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await episode.aclose()
    assert made[0].closed == 1


async def test_the_environment_says_what_a_perfect_policy_would():
    async with stepped() as episode:
        with pytest.raises(ContractError, match="that has not started"):
            await episode.gold()
        await episode.begin()
        assert await episode.gold() == "not yet"
        await episode.act("no")
        await episode.act(await episode.gold())
        assert episode.trajectory.score == 1.0
