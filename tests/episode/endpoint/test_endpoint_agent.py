"""Agents with a loop of their own, run as episodes."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.request

import httpx
import pytest

from agentenv.core.types import Limits, SamplingParams, StepResult, StopReason, Task
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.endpoint.agent import AgentContext, ChatAgentSource
from agentenv.episode.setup import EpisodeKey, EpisodeSetup
from agentenv.errors import ConfigError, InfraError, RunStopped
from agentenv.rewards.judges.protocol import JudgeUsage, Price
from tests.episode.endpoint.scenes import assert_exact, chat_of, user
from tests.waits import until

CLOSED = []


class Agent:
    """Asks until the answer is the label."""

    def __init__(self, tries=3):
        self.tries = tries

    async def run(self, context):
        messages = context.messages
        async with httpx.AsyncClient(base_url=context.base_url, timeout=30) as http:
            for _ in range(self.tries):
                answer = await http.post("chat/completions", json={"messages": messages, "model": context.model})
                answer.raise_for_status()
                message = answer.json()["choices"][0]["message"]
                if message["content"] == context.label:
                    return StepResult(reward=1.0, score=1.0, info={"tries": float(len(messages))})
                messages = [*messages, message, user("Try again.")]
        return 0.0

    async def close(self):
        CLOSED.append(self)


def engine_of(script, **options):
    return ScriptedEngine(script, chat_of("Qwen3").tokenizer, **options)


async def played(source, engine, limits=None):
    setup = EpisodeSetup(engine, chat_of("Qwen3"), limits=limits or Limits())
    return await source.run(Task("What is 6 x 7?", "42"), setup, EpisodeKey("e1", "g1", 2, 3))


async def episode(cls, script, *, limits=None, **kwargs):
    engine = script if isinstance(script, ScriptedEngine) else engine_of(script)
    source = ChatAgentSource(cls, kwargs)
    trajectory = await played(source, engine, limits)
    assert source._endpoint is None
    return trajectory, engine


@pytest.mark.long
async def test_an_agents_episode_is_a_trajectory_like_any_other():
    del CLOSED[:]
    trajectory, engine = await episode(Agent, ["41", "42"])
    assert (trajectory.reward, trajectory.score, trajectory.stop_reason) == (1.0, 1.0, StopReason.TERMINATED)
    assert (trajectory.episode_id, trajectory.group_id, trajectory.attempt, trajectory.seed) == ("e1", "g1", 2, 3)
    assert len(trajectory.turns) == 2
    assert trajectory.turns[-1].result.info == {"tries": 3.0}
    assert_exact(trajectory, engine)
    assert len(CLOSED) == 1


@pytest.mark.parametrize(("tries", "cost"), [(1, 3.0), (3, 7.0)])
async def test_what_judges_cost_in_run_and_on_truncate_is_in_the_info_of_the_episode(tries, cost):
    class Judged(Agent):
        async def run(self, context):
            JudgeUsage(Price(prompt=1e6)).add(prompt_tokens=3)
            return await super().run(context)

        async def on_truncate(self, context):
            JudgeUsage(Price(prompt=1e6)).add(prompt_tokens=4)
            return 0.0

    trajectory, _ = await episode(Judged, ["41"], limits=Limits(max_turns=2), tries=tries)
    assert trajectory.turns[-1].result.info == {"judge/prompt_tokens": cost, "judge/cost": cost}


async def test_a_plain_run_is_a_thread_and_may_return_a_number():
    class Plain(Agent):
        def run(self, context):
            with httpx.Client(timeout=30) as http:
                body = {"messages": context.messages}
                answer = http.post(f"{context.base_url}/chat/completions", json=body)
            return int(answer.json()["choices"][0]["message"]["content"] == context.label)

    trajectory, _ = await episode(Plain, ["42"])
    assert trajectory.reward == 1.0


@pytest.mark.parametrize(("error", "kind"), [(KeyError("oops"), "env"), (InfraError("search: no answer."), "infra")])
async def test_an_exception_of_an_agent_is_recorded_with_its_place_and_the_agent_is_closed(error, kind):
    class Broken(Agent):
        async def run(self, context):
            await super().run(context)
            raise error

    del CLOSED[:]
    trajectory, _ = await episode(Broken, ["41", "42"])
    assert (trajectory.stop_reason, trajectory.error.kind, trajectory.error.where) == (StopReason.ERROR, kind, "run")
    assert "test_endpoint_agent.py" in trajectory.error.place
    assert (trajectory.reward, len(trajectory.turns), len(CLOSED)) == (None, 2, 1)


@pytest.mark.long
async def test_an_agent_that_asked_nothing_or_gave_nothing_broke_the_contract():
    class Silent(Agent):
        async def run(self, context):
            return 1.0

    class Mute(Agent):
        async def run(self, context):
            await super().run(context)

    for cls in (Silent, Mute):
        trajectory, _ = await episode(cls, ["42"])
        assert (trajectory.error.kind, trajectory.reward) == ("contract", None)


@pytest.mark.long
@pytest.mark.parametrize("how", ["swallowed", "raised", "quoted"])
async def test_an_episode_without_a_turn_names_the_last_refused_request(how, caplog):
    class Refused(Agent):
        async def run(self, context):
            async with httpx.AsyncClient(base_url=context.base_url, timeout=30) as http:
                await http.post("embeddings", json={})
                refused = await http.post("chat/completions", json={"messages": context.messages, "n": 2})
            if how == "quoted":
                raise RuntimeError(refused.text)
            if how == "raised":
                raise RuntimeError("the agent failed")
            return 0.0

    trajectory, _ = await episode(Refused, ["42"])
    assert trajectory.error.kind == ("contract" if how == "swallowed" else "env")
    if how == "quoted":
        assert trajectory.error.message.count("n: expected 1, got 2.") == 1
        return
    assert "the last of 2 requests without an answer: n: expected 1, got 2." in trajectory.error.message
    assert ("the agent failed" in trajectory.error.message) == (how == "raised")
    assert trajectory.refusals == {"http_error": 1, "invalid_request": 1}
    told = [record.getMessage() for record in caplog.records if "was refused" in record.getMessage()]
    assert len(told) == 2
    assert "n: expected 1, got 2." in told[1]


async def test_a_failed_engine_is_infrastructures_whatever_the_agent_makes_of_it():
    class Calm(Agent):
        async def run(self, context):
            try:
                return await super().run(context)
            except httpx.HTTPStatusError:
                return 0.0

    for cls in (Agent, Calm):  # the agent's own exception says the same later and with less
        trajectory, _ = await episode(cls, engine_of(["41"], crash_at=[1]))
        assert (trajectory.error.kind, trajectory.error.type, trajectory.reward) == ("infra", "EngineError", None)


@pytest.mark.long
async def test_an_agent_that_runs_out_of_turns_is_truncated_and_has_a_last_word():
    class Graded(Agent):
        async def on_truncate(self, context):
            return 0.25

    trajectory, _ = await episode(Agent, ["41"], limits=Limits(max_turns=2))
    assert (trajectory.stop_reason, trajectory.error, trajectory.reward) == (StopReason.MAX_TURNS, None, None)
    trajectory, _ = await episode(Graded, ["41"], limits=Limits(max_turns=2))
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.MAX_TURNS, 0.25)
    trajectory, _ = await episode(Graded, ["41"], limits=Limits(max_length=40))
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.MAX_LENGTH, 0.25)


async def test_an_agent_that_raises_because_its_answer_was_cut_short_ran_out_of_room():
    class Strict(Agent):
        async def run(self, context):
            async with httpx.AsyncClient(base_url=context.base_url, timeout=30) as http:
                answer = await http.post("chat/completions", json={"messages": context.messages})
            if answer.json()["choices"][0]["finish_reason"] == "length":
                raise RuntimeError("cut")
            return 1.0

        async def on_truncate(self, context):
            return 0.25

    trajectory, _ = await episode(Strict, ["one two three " * 20], limits=Limits(max_length=40))
    assert (trajectory.stop_reason, trajectory.error, trajectory.reward) == (StopReason.MAX_LENGTH, None, 0.25)
    assert (len(trajectory.turns), trajectory.refusals) == (1, {})


@pytest.mark.long
async def test_an_agent_without_on_truncate_is_warned_once_that_episodes_have_no_reward(caplog):
    class Graded(Agent):
        async def on_truncate(self, context):
            return 0.25

    for cls, hints in ((Agent, 1), (Graded, 0)):
        caplog.clear()
        source = ChatAgentSource(cls)
        for _ in range(2):
            await played(source, engine_of(["41"]), Limits(max_turns=2))
        told = [record.getMessage() for record in caplog.records if "on_truncate" in record.getMessage()]
        assert len(told) == hints
        assert all("Agent.on_truncate: expected a reward for an episode that ended as max_turns" in t for t in told)
        assert all("Write `on_truncate(self, context)`" in each for each in told)


@pytest.mark.long
@pytest.mark.parametrize(("score_range", "score"), [((0.0, 1.0), None), ((0.0, 5.0), 3.0), (None, 3.0)])
async def test_the_score_of_an_agent_is_within_the_range_that_its_class_declares(score_range, score):
    class Graded(Agent):
        async def run(self, context):
            await super().run(context)
            return StepResult(reward=1.0, score=3.0)

    if score is not None:
        Graded.score_range = score_range
    trajectory, _ = await episode(Graded, ["42"])
    assert trajectory.score == score
    expected = "Graded.run: expected a score in [0, 1], got 3.0."
    assert (trajectory.error is None) == (score is not None)
    assert score is not None or trajectory.error.message.startswith(expected)


@pytest.mark.long
@pytest.mark.parametrize("answer", [{}, {"rewards": 1.0, "done": True}])
async def test_a_run_may_return_openrlhfs_step_dict_and_another_is_answered_with_what_it_may_return(answer):
    class Giving(Agent):
        async def run(self, context):
            await super().run(context)
            return answer

    trajectory, _ = await episode(Giving, ["42"])
    assert (trajectory.reward, trajectory.error.kind) == (None, "contract")
    expected = f"Giving.run: expected the reward or a StepResult, got a dict with the keys {sorted(answer)}"
    assert expected in trajectory.error.message
    assert "environment_feedback" not in trajectory.error.message
    answer |= {"rewards": 0.5, "environment_feedback": "", "done": True}
    assert (await episode(Giving, ["42"]))[0].reward == 0.5


@pytest.mark.long
async def test_time_that_runs_out_cancels_the_agent_and_its_generation():
    engine = engine_of(["41"], latency_s=600)
    trajectory, _ = await episode(Agent, engine, limits=Limits(episode_timeout_s=3))
    assert (trajectory.stop_reason, trajectory.error) == (StopReason.EPISODE_TIMEOUT, None)
    assert engine.num_cancelled == 1


async def test_cancelling_an_episode_closes_its_agent_and_the_server():
    del CLOSED[:]
    engine = engine_of(["41"], latency_s=30)
    before = asyncio.all_tasks()
    work = asyncio.ensure_future(episode(Agent, engine))
    await until(lambda: engine.requests)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    await until(lambda: asyncio.all_tasks() == before)
    assert (len(CLOSED), engine.num_cancelled) == (1, 1)


@pytest.mark.long
@pytest.mark.parametrize("kind", [ConfigError, RunStopped])
async def test_what_an_engine_says_of_the_whole_run_ends_it_no_matter_what_the_agent_makes_of_it(kind):
    class Calm(Agent):
        async def run(self, context):
            with contextlib.suppress(httpx.HTTPStatusError):
                await super().run(context)
            return 0.0

    for cls in (Agent, Calm):
        with pytest.raises(kind, match="expected a model"):
            await episode(cls, [kind("engine: expected a model, got none. Give one.")])


@pytest.mark.parametrize(
    ("own", "told"),
    [({}, "127.0.0.1"), ({"NO_PROXY": "a,b"}, "a,b,127.0.0.1"), ({"no_proxy": "c", "NO_PROXY": "d"}, "c,127.0.0.1")],
)
def test_another_process_reaches_the_endpoint_past_the_proxy_of_a_cluster(monkeypatch, own, told):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    context = AgentContext("http://127.0.0.1:1/v1", "key", "m", "Q", None, {}, None, SamplingParams())
    assert (context.environ["NO_PROXY"], context.environ["no_proxy"]) == (told, told)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:2")
    for name, value in context.environ.items():
        monkeypatch.setenv(name, value)
    assert urllib.request.proxy_bypass("127.0.0.1")


@pytest.mark.parametrize(("own", "told"), [(None, "true"), ("false", "false")])
def test_openai_agents_in_another_process_sends_its_traces_to_openai_only_if_the_user_says_so(monkeypatch, own, told):
    monkeypatch.delenv("OPENAI_AGENTS_DISABLE_TRACING", raising=False)
    if own is not None:
        monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", own)
    context = AgentContext("http://127.0.0.1:1/v1", "key", "m", "Q", None, {}, None, SamplingParams())
    assert context.environ["OPENAI_AGENTS_DISABLE_TRACING"] == told


def test_a_class_without_run_and_wrong_arguments_are_refused():
    with pytest.raises(ConfigError, match="run"):
        ChatAgentSource(int)
    with pytest.raises(ConfigError, match="trys"):
        ChatAgentSource(Agent, {"trys": 1})


@pytest.mark.long
async def test_a_constructor_may_be_async_and_has_a_deadline():
    class Slow(Agent):
        async def __init__(self):
            await asyncio.sleep(600)

    trajectory, _ = await episode(Slow, ["42"], limits=Limits(step_timeout_s=2))
    assert (trajectory.stop_reason, trajectory.error.where) == (StopReason.STEP_TIMEOUT, "create")


@pytest.mark.parametrize(("answer", "reason"), [("42", StopReason.TERMINATED), ("41", StopReason.MAX_TURNS)])
async def test_an_error_of_close_changes_nothing_of_the_episode(answer, reason):
    class Closing(Agent):
        async def close(self):
            raise RuntimeError("late")

    trajectory, _ = await episode(Closing, [answer], limits=Limits(max_turns=2))
    assert (trajectory.stop_reason, trajectory.error) == (reason, None)


@pytest.mark.long
async def test_a_last_word_or_a_close_that_hangs_is_given_up():
    class Hanging(Agent):
        async def on_truncate(self, context):
            await asyncio.sleep(600)

    trajectory, _ = await episode(Hanging, ["41"], limits=Limits(max_turns=2, step_timeout_s=2))
    assert (trajectory.stop_reason, trajectory.error.type) == (StopReason.STEP_TIMEOUT, "StepTimeout")
    assert (trajectory.error.where, len(trajectory.turns)) == ("on_truncate", 2)
    assert trajectory.wait_s > 0


@pytest.mark.long
async def test_a_server_that_is_kept_up_serves_one_episode_after_another():
    source, ports = ChatAgentSource(Agent), set()
    async with source.serving() as endpoint:
        for _ in range(3):
            assert (await played(source, engine_of(["42"]))).reward == 1.0
            ports.add((await source._endpoint).port)
    assert (ports, source._endpoint) == ({endpoint.port}, None)
