"""agent_func.py files of every OpenRLHF version, run through AgentFunc as they were published."""

import asyncio
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from agentenv.chat.chat import Chat
from agentenv.core.agent import AgentInstance
from agentenv.core.types import Limits, SamplingParams, StepResult, StopReason, Task
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.setup import EpisodeKey, EpisodeSetup
from agentenv.episode.source import as_agent
from agentenv.errors import ConfigError, ContractError, EngineError, InfraError, MissingDependency, RunStopped
from agentenv.interop.agent_files import OPENRLHF_NAMES
from agentenv.interop.openrlhf.executor import AgentExecutor, AgentFunc, AgentInstanceBase
from agentenv.interop.openrlhf.reward_func import SingleTurnAgentExecutor
from agentenv.interop.openrlhf.shim import openrlhf_stand_in
from agentenv.testing.tokenizers import CharTokenizer

FILES = Path(__file__).parent / "agent_funcs"
KEY = EpisodeKey("task-0/3", "task-0", attempt=2, seed=11)
TASK = Task("What is 6 x 7?", label="42")


@pytest.fixture
def shim():
    """The stand-in for OpenRLHF's module; gone again after the test."""
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "openrlhf"}
    with openrlhf_stand_in(OPENRLHF_NAMES):
        yield
    for name in [name for name in sys.modules if name.split(".")[0] == "openrlhf"]:
        del sys.modules[name]
    sys.modules.update(kept)


def load(name):
    """An agent file's executor, loaded as OpenRLHF loads it."""
    spec = importlib.util.spec_from_file_location("agent_module", FILES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.AgentExecutor


async def play(executor_cls, script=("hello",), *, task=TASK, engine=None, func=None, limits=None, **sampling):
    tokenizer = CharTokenizer()
    engine = engine or ScriptedEngine(script, tokenizer)
    func = func or AgentFunc(executor_cls)
    limits = limits or Limits(max_length=600, max_turns=8)
    return await func.run(task, EpisodeSetup(engine, Chat(tokenizer), SamplingParams(**sampling), limits), KEY)


class Judge(AgentInstance):
    """One wrong answer is forgiven."""

    def __init__(self, word="42"):
        self.word, self.tries = word, 0

    async def step(self, states):
        self.tries += 1
        right = self.word in states["action_text"]
        return StepResult("again", reward=float(right), score=float(right), terminated=right or self.tries == 2)


class Judging(AgentExecutor):
    agent_cls = Judge


class Served(AgentExecutor):
    """Asks a server of its own, which makes a status of every failure."""

    agent_cls = Judge

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        type(self).engine = engine = getattr(type(self), "engine", None) or llm_engine  # that of the first episode

        async def serve():
            try:
                await engine.generate([1, 2], sampling_params)
            except (InfraError, ContractError):
                return 500
            return 200

        if (status := await serve()) != 200 or label == "broken":
            raise ValueError(f"status {status}")
        return await super().execute(prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine)


async def test_a_failure_of_the_engine_in_a_files_own_server_is_infrastructure():
    class Down(ScriptedEngine):
        is_down = True

        async def generate(self, *args, **kwargs):
            if self.is_down:
                raise EngineError("vllm: expected an answer, got none. Look at its log.")
            return await super().generate(*args, **kwargs)

    class File(Served):
        pass

    engine, func = Down(["42"], CharTokenizer()), AgentFunc(File)
    for _ in range(2):
        error = (await play(File, engine=engine, func=func)).error
        assert (error.kind, error.type) == ("infra", "ValueError")
        assert "status 500 (after: vllm: expected an answer, got none" in error.message
    engine.is_down = False
    assert (await play(File, engine=engine, func=func)).error is None
    error = (await play(File, engine=engine, func=func, task=Task("?", label="broken"))).error
    assert (error.kind, error.message) == ("env", "status 200")


async def test_a_bug_of_the_engine_in_a_files_own_server_is_a_contract_error():
    class File(Served):
        pass

    error = (await play(File, lambda _: 1 // 0)).error
    assert (error.kind, error.type) == ("contract", "ValueError")
    assert "got ZeroDivisionError" in error.message


async def test_a_failure_of_another_episodes_engine_leaves_an_error_of_the_file_its_own():
    class Down(ScriptedEngine):
        async def generate(self, *args, **kwargs):
            failed.set()
            raise EngineError("vllm: expected an answer, got none. Look at its log.")

    class File(AgentExecutor):
        agent_cls = Judge

        async def execute(self, prompt, label, sampling_params, llm_engine):
            if label == "broken":
                await failed.wait()
                await asyncio.sleep(0)
                raise KeyError("mine")
            await llm_engine.generate([1, 2], sampling_params)

    failed, engine, func = asyncio.Event(), Down(["42"], CharTokenizer()), AgentFunc(File)
    other, mine = await asyncio.gather(
        *(play(File, engine=engine, func=func, task=Task("?", label=label)) for label in ("asks", "broken"))
    )
    assert (other.error.kind, mine.error.kind, mine.error.message) == ("infra", "env", "'mine'")


# --- the guide's files and OpenRLHF's own form ----------------------------------------------------------------------


@pytest.mark.usefixtures("shim")
@pytest.mark.parametrize(
    ("script", "rewards", "score", "info"),
    [
        (["x = 41", "x = 42"], [0.0, 1.0], 1.5, {"step": 2, "correct": 1, "attempts": 2}),
        (["no idea"], [0.0, 0.0, -0.5], 0.0, {"step": 3, "correct": 0, "attempts": 3}),
    ],
    ids=["right at last", "no answer"],
)
async def test_the_guides_maths_agent_runs_unmodified(script, rewards, score, info):
    trajectory = await play(load("math_agent"), script)
    assert trajectory.error is None
    assert [turn.result.reward for turn in trajectory.turns] == pytest.approx(rewards)
    assert trajectory.score == pytest.approx(score)
    assert trajectory.turns[-1].result.info == info
    assert trajectory.stop_reason is StopReason.TERMINATED


# --- our own form ---------------------------------------------------------------------------------------------------


async def test_a_subclass_passes_arguments_to_its_agents():
    class Other(Judging):
        agent_kwargs = MappingProxyType({"word": "seven"})

    assert (await play(Other, ["seven"])).reward == 1.0


async def test_messages_reach_the_file_as_the_templates_text():
    class Executor(Judging):
        async def execute(self, prompt, label, sampling_params):
            prompts.append(prompt)
            return await super().execute(prompt, label, sampling_params)

    prompts = []
    await play(Executor, ["42"], task=Task([{"role": "user", "content": "6 x 7?"}], label="42"))
    assert prompts == ["<|im_start|>user\n6 x 7?<|im_end|>\n<|im_start|>assistant\n"]


async def test_messages_that_end_with_an_answer_reach_no_file():
    class Executor(AgentExecutor):
        async def execute(self, prompt, label, sampling_params):
            return OWN

    task = Task([{"role": "user", "content": "6 x 7?"}, {"role": "assistant", "content": "42"}])
    trajectory = await play(Executor, task=task)
    assert "expected the last one to be from another role than assistant" in trajectory.error.message


async def test_an_override_may_change_prompt_label_and_sampling():
    class Executor(Judging):
        async def execute(self, prompt, label, sampling_params):
            return await super().execute(prompt + " Think.", "other", SamplingParams(temperature=0.0))

    engine = ScriptedEngine(["42"], CharTokenizer())
    trajectory = await play(Executor, engine=engine)
    assert (engine.requests[0].prompt, engine.requests[0].sampling.temperature) == ("What is 6 x 7? Think.", 0.0)
    assert (trajectory.task.prompt, trajectory.task.label) == ("What is 6 x 7? Think.", "other")


async def test_the_constructors_agent_wins_over_the_attribute_and_needs_no_base():
    class Bare:
        def step(self, states):
            return {"rewards": 0.5, "environment_feedback": "", "done": True}

    class Executor(Judging):
        def __init__(self):
            super().__init__(Bare)

    assert (await play(Executor)).reward == 0.5
    assert as_agent(Judge) is Judge


# --- overrides of execute ---------------------------------------------------------------------------------------------

OWN = {
    "prompt": "p", "label": "l", "observation_tokens": [10, 11, 12, 13], "action_ranges": [(1, 2), (3, 4)],
    "rollout_log_probs": [0.0, -0.5, 0.0, -0.25], "reward": 0.75, "scores": 0.5, "truncated": False, "extra_logs": {},
}  # fmt: skip


async def test_an_override_may_make_the_episode_itself():
    class Executor(AgentExecutor):
        async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
            assert (max_length, images) == (600, None)
            assert (type(hf_tokenizer), type(llm_engine.engine)) == (CharTokenizer, ScriptedEngine)
            return OWN

    trajectory = await play(Executor)
    assert trajectory.token_ids.tolist() == [10, 11, 12, 13]
    assert list(trajectory.action_mask) == [0, 1, 0, 1]
    assert (trajectory.reward, trajectory.score, trajectory.stop_reason) == (0.75, 0.5, StopReason.TERMINATED)
    assert (trajectory.episode_id, trajectory.attempt, trajectory.seed) == ("task-0/3", 2, 11)


@pytest.mark.parametrize("in_place", [True, False])
async def test_an_override_that_changes_the_reward_is_heard(in_place):
    class Executor(Judging):
        async def execute(self, *args, **kwargs):
            response = await super().execute(*args, **kwargs)
            response = response if in_place else dict(response)
            response["reward"] -= 0.25
            return response

    trajectory = await play(Executor, ["42"])
    assert (trajectory.error, trajectory.reward) == (None, 0.75)


async def test_an_override_that_only_adds_a_log_keeps_turns_stop_reason_and_versions():
    class Executor(Judging):
        async def execute(self, *args, **kwargs):
            response = await super().execute(*args, **kwargs)
            return {**response, "extra_logs": {**response["extra_logs"], "mine": 3.0}}

    trajectory = await play(Executor, ["41"], limits=Limits(max_length=400, max_turns=1))
    assert (trajectory.stop_reason, trajectory.max_length) == (StopReason.MAX_TURNS, 400)
    assert len(trajectory.turns) == 1
    assert trajectory.turns[-1].result.info["mine"] == 3.0
    assert all(turn.generate_s > 0 for turn in trajectory.turns)


async def test_an_executor_of_any_arguments_is_given_all_of_them():
    seen = {}

    class Executor(Judging):
        def __init__(self, **kwargs):
            seen.update(kwargs)
            super().__init__(**kwargs)

        async def execute(self, prompt, label, sampling_params, **kwargs):
            seen.update(kwargs)
            return await super().execute(prompt, label, sampling_params, **kwargs)

    assert (await play(Executor, ["42"])).reward == 1.0
    assert {"llm_engine", "hf_tokenizer", "max_length", "max_steps", "result_queue", "images"} <= set(seen)


async def test_an_override_that_returns_nothing_keeps_the_episode():
    class Executor(Judging):
        async def execute(self, *args, **kwargs):
            await super().execute(*args, **kwargs)

    assert (await play(Executor, ["42"])).reward == 1.0


async def test_an_override_may_play_twice_and_keep_the_better_one():
    class Executor(Judging):
        async def execute(self, *args, **kwargs):
            tries = [await super(Executor, self).execute(*args, **kwargs) for _ in range(2)]
            return max(tries, key=lambda response: response["reward"])

    engine = ScriptedEngine(lambda request: "42" if request.call_index == 0 else "no", CharTokenizer())
    assert (await play(Executor, engine=engine)).reward == 1.0


@pytest.mark.parametrize(
    ("error", "kind"), [(ValueError("no"), "env"), (InfraError("down"), "infra")], ids=["env", "infra"]
)
async def test_an_override_that_raises_is_recorded(error, kind):
    class Executor(Judging):
        async def execute(self, *args, **kwargs):
            raise error

    made = await play(Executor)
    assert (made.stop_reason, made.error.kind, made.error.where) == (StopReason.ERROR, kind, "execute")
    assert (made.episode_id, made.reward) == ("task-0/3", None)


@pytest.mark.parametrize(
    "value", ["text", 7, [], None, {}, OWN | {"reward": None}, OWN | {"action_ranges": [(3, 9)]}], ids=repr
)
async def test_an_override_that_returns_garbage_breaks_the_contract(value):
    class Executor(AgentExecutor):
        async def execute(self, *args, **kwargs):
            return value

    trajectory = await play(Executor)
    assert (trajectory.stop_reason, trajectory.error.kind) == (StopReason.ERROR, "contract")
    assert trajectory.reward is None


async def test_a_constructor_that_raises_is_recorded():
    class Executor(Judging):
        def __init__(self):
            raise ValueError("no licence")

    trajectory = await play(Executor)
    assert (trajectory.stop_reason, trajectory.error.message) == (StopReason.ERROR, "no licence")


# --- called by a foreign trainer --------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["hf_tokenizer", "llm_engine", "max_length"])
async def test_execute_names_what_it_was_not_given(missing):
    tokenizer = CharTokenizer()
    arguments = {"hf_tokenizer": tokenizer, "llm_engine": ScriptedEngine(["42"], tokenizer), "max_length": 200}
    del arguments[missing]
    with pytest.raises(ConfigError, match="expected max_length, hf_tokenizer and llm_engine"):
        await Judging().execute("p", "42", SamplingParams(), **arguments)


async def test_a_response_that_an_override_puts_on_the_queue_is_the_episodes():
    """The queue era's custom `execute` returns nothing."""
    tok = CharTokenizer()

    class Queued(AgentExecutor):
        async def execute(self, prompt, label, sampling_params):
            ids = tok.encode("ab", add_special_tokens=False)
            response = {"observation_tokens": ids, "action_ranges": [(1, 2)], "reward": 0.25}
            await self.result_queue.put(response)

    func = AgentFunc(Queued)
    done = await asyncio.gather(*(play(None, func=func) for _ in range(3)))
    assert [trajectory.reward for trajectory in done] == [0.25] * 3


async def test_a_response_without_a_reward_is_an_episode_without_one():
    async def execute(self, prompt, label, sampling_params, llm_engine):
        ids = (await llm_engine.generate([5, 6], sampling_params)).outputs[0].token_ids
        return {
            "observation_tokens": [5, 6, *ids],
            "action_ranges": [(2, 2 + len(ids))],
            "rollout_log_probs": [0.0] * (2 + len(ids)),
            "reward": None,
            "scores": None,
        }

    trajectory = await play(type("AgentExecutor", (), {"execute": execute}), ["hi"])
    assert (trajectory.error, trajectory.reward, trajectory.stop_reason) == (None, None, StopReason.TERMINATED)
    assert [turn.action for turn in trajectory.turns] == ["hi"]


# --- what an engine says, and files that fail after the loop ------------------------------------------------------


class Alone(AgentExecutor):
    """Samples four candidates itself, and takes whatever its engine raises for an answer of nothing."""

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, **_):
        tokens, said = hf_tokenizer.encode(prompt), []
        for _ in range(4):
            try:
                said.append(await self.ask(llm_engine, tokens, sampling_params))
            except Exception:
                said.append([7])
        return {
            "observation_tokens": tokens + said[0],
            "action_ranges": [(len(tokens), len(tokens) + len(said[0]))],
            "reward": 1.0,
        }

    async def ask(self, llm_engine, tokens, sampling_params):
        return (await llm_engine.generate(tokens, sampling_params)).outputs[0].token_ids


class OfTheQueueEra(Alone):
    async def ask(self, llm_engine, tokens, sampling_params):
        return (await self.generate(tokens, sampling_params)).outputs[0].token_ids


class InOurForm(Alone):
    async def ask(self, llm_engine, tokens, sampling_params):
        sampling = SamplingParams(max_tokens=sampling_params.max_tokens)
        return list((await llm_engine.generate(tokens, sampling, request_id="e/0")).token_ids)


@pytest.mark.parametrize("executor_cls", [Judging, Alone, OfTheQueueEra, InOurForm])
@pytest.mark.parametrize("kind", [RunStopped, ConfigError, MissingDependency])
async def test_what_an_engine_says_of_the_whole_run_ends_it_no_matter_what_the_file_makes_of_it(executor_cls, kind):
    with pytest.raises(kind, match="no engine is left"):
        await play(executor_cls, [kind("pool: no engine is left.")])


@pytest.mark.parametrize("executor_cls", [Alone, OfTheQueueEra])
async def test_candidates_that_a_file_samples_differ_under_the_runs_seed_and_are_numbered(executor_cls):
    engine = ScriptedEngine(lambda request: f"seed {request.sampling.seed}", CharTokenizer())
    trajectory = await play(executor_cls, engine=engine, seed=7)
    assert trajectory.error is None
    assert [request.sampling.seed for request in engine.requests] == [7, 8, 9, 10]
    assert [request.request_id for request in engine.requests] == [f"task-0/3/{turn}" for turn in range(4)]


def afterwards(spoil):
    class Spoiled(Judging):
        async def execute(self, *args, **kwargs):
            response = await super().execute(*args, **kwargs)
            await spoil(response)
            return response

    return Spoiled


async def test_a_file_that_raises_after_the_loop_keeps_the_turns_and_has_no_reward():
    async def spoil(response):
        raise RuntimeError("the reward server is down")

    trajectory = await play(afterwards(spoil), ["no", "it is 42"])
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.ERROR, None)
    assert (trajectory.error.kind, trajectory.error.message) == ("env", "the reward server is down")
    assert [turn.action for turn in trajectory.turns] == ["no", "it is 42"]
    assert (trajectory.turns[0].result.reward, trajectory.turns[1].result) == (0.0, None)
    assert not any(trajectory.segments[0].rewards)


@pytest.mark.long
def test_a_file_that_hangs_after_the_loop_keeps_the_turns_and_has_no_reward(virtual_clock):
    async def spoil(response):
        await asyncio.Event().wait()

    limits = Limits(max_length=600, episode_timeout_s=60.0, step_timeout_s=60.0)
    trajectory = virtual_clock.run(play(afterwards(spoil), ["it is 42"], limits=limits))
    assert (trajectory.stop_reason, trajectory.error) == (StopReason.EPISODE_TIMEOUT, None)
    assert ([turn.action for turn in trajectory.turns], trajectory.reward) == (["it is 42"], None)


@pytest.mark.parametrize("fails", [True, False])
async def test_what_a_file_does_to_a_failed_episode_leaves_that_its_error(fails):
    async def spoil(response):
        response["extra_logs"]["seen"] = 1.0
        if fails:
            response["reward"] *= 2  # it is None

    trajectory = await play(afterwards(spoil), engine=ScriptedEngine(["42"], CharTokenizer(), crash_at=0))
    assert (trajectory.error.kind, trajectory.error.type, trajectory.reward) == ("infra", "EngineError", None)


async def test_a_reward_that_a_file_takes_away_is_none():
    async def spoil(response):
        response["reward"] = None

    trajectory = await play(afterwards(spoil), ["no", "it is 42"])
    assert (trajectory.stop_reason, trajectory.error, trajectory.reward) == (StopReason.TERMINATED, None, None)
    assert len(trajectory.turns) == 2


# --- what a step may change, and what leaves the loop ---------------------------------------------------------------


STEP = {"rewards": 1.0, "environment_feedback": "again", "done": False}


class Narrowing(AgentInstanceBase):
    """Writes into the sampling parameters, as OpenRLHF's files do."""

    def step(self, states):
        states["sampling_params"].stop = ["END"]
        states["sampling_params"].temperature /= 2
        return {**STEP, "done": states["turn_index"] == 2}


class AsyncNarrowing(Narrowing):
    async def step(self, states):
        return super().step(states)


@pytest.mark.parametrize("agent_cls", [Narrowing, AsyncNarrowing])
async def test_a_step_may_write_into_the_sampling_parameters_of_the_next_turns(agent_cls):
    engine = ScriptedEngine(["a"], CharTokenizer())
    trajectory = await play(type("Executor", (AgentExecutor,), {"agent_cls": agent_cls}), engine=engine)
    assert trajectory.error is None
    asked = [(request.sampling.temperature, request.sampling.stop) for request in engine.requests]
    assert asked == [(1.0, ()), (0.5, ("END",)), (0.25, ("END",))]


class Quiet(AgentInstanceBase):
    """Leaves the sampling parameters as they are."""

    async def step(self, states):
        return STEP


class Constrained(ScriptedEngine):
    """Samples as if it followed the structural tag."""

    async def generate(self, prompt_token_ids, sampling, *, request_id):
        return replace(await super().generate(prompt_token_ids, sampling, request_id=request_id), forced=())


@pytest.mark.parametrize("writes", [True, False])
async def test_a_structural_tag_holds_for_every_turn_and_what_a_step_does_not_write_is_not_recorded(writes):
    class Executor(AgentExecutor):
        agent_cls = Narrowing if writes else Quiet

    engine = Constrained(["a"], CharTokenizer())
    limits = Limits(max_length=600, max_turns=3)
    trajectory = await play(Executor, engine=engine, limits=limits, structural_tag="{}")
    assert trajectory.error is None
    assert [request.sampling.structural_tag for request in engine.requests] == ["{}"] * 3
    assert writes or [turn.result.sampling for turn in trajectory.turns] == [None] * 3


async def test_a_step_that_gives_the_sampling_parameters_back_changes_nothing():
    class Returning(AgentInstanceBase):
        async def step(self, states):
            return {**STEP, "sampling_params": states["sampling_params"]}

    engine = ScriptedEngine(["a"], CharTokenizer())
    executor_cls = type("Executor", (AgentExecutor,), {"agent_cls": Returning})
    await play(executor_cls, engine=engine, limits=Limits(max_turns=3), max_tokens=7, seed=1)
    assert [(each.sampling.max_tokens, each.sampling.seed) for each in engine.requests] == [(7, 1), (7, 2), (7, 3)]


async def test_the_sampling_parameters_that_a_step_returns_win_over_those_it_wrote_into():
    class Returning(AgentInstanceBase):
        async def step(self, states):
            states["sampling_params"].temperature = 0.5
            params = states["sampling_params"].clone()
            params.temperature = 0.1
            return {"rewards": 1.0, "environment_feedback": "more", "done": False, "sampling_params": params}

    engine = ScriptedEngine(["a"], CharTokenizer())
    executor_cls = type("Executor", (AgentExecutor,), {"agent_cls": Returning})
    await play(executor_cls, engine=engine, limits=Limits(max_length=600, max_turns=2))
    assert [request.sampling.temperature for request in engine.requests] == [1.0, 0.1]


class PassingOn(AgentExecutor):
    """Has an execute of its own, which changes nothing."""

    async def execute(self, prompt, label, sampling_params):
        return await super().execute(prompt, label, sampling_params)


class Raising(AgentInstanceBase):
    """Raises until a class attribute says otherwise."""

    failures = 1

    async def step(self, states):
        if type(self).failures:
            type(self).failures -= 1
            raise KeyError("no board")
        return {"rewards": 1.0, "environment_feedback": "", "done": True}


async def test_an_exception_of_step_leaves_execute_inside_of_a_files_own():
    caught = []

    class Executor(AgentExecutor):
        agent_cls = Raising

        async def execute(self, prompt, label, sampling_params):
            try:
                return await super().execute(prompt, label, sampling_params)
            except KeyError as error:
                caught.append(error)
                return await super().execute(prompt, label, sampling_params)

    Raising.failures = 1
    trajectory = await play(Executor)
    assert [str(error) for error in caught] == ["'no board'"]
    assert (trajectory.error, trajectory.reward) == (None, 1.0)


async def test_an_exception_that_a_files_execute_lets_pass_is_the_episodes_error():
    class Executor(PassingOn):
        agent_cls = Raising

    Raising.failures = 1
    trajectory = await play(Executor)
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.ERROR, None)
    assert (trajectory.error.kind, trajectory.error.type, trajectory.error.where) == ("env", "KeyError", "step")
    assert trajectory.error.place.startswith(__file__)


async def test_an_error_of_close_keeps_the_reward_also_inside_of_a_files_own_execute():
    class Closing(Judge):
        async def close(self):
            raise RuntimeError("late")

    class Executor(PassingOn):
        agent_cls = Closing

    trajectory = await play(Executor, ["42"])
    assert (trajectory.stop_reason, trajectory.reward, trajectory.error) == (StopReason.TERMINATED, 1.0, None)


# --- one answer -----------------------------------------------------------------------------------------------------


async def test_a_single_turn_executor_leaves_the_reward_to_its_subclass():
    class Executor(SingleTurnAgentExecutor):
        async def execute(self, prompt, label, *args, **kwargs):
            response = await super().execute(prompt, label, *args, **kwargs)
            assert (response["reward"], response["scores"], response["truncated"]) == (None, None, False)
            start, end = response["action_ranges"][0]
            assert CharTokenizer().decode(response["observation_tokens"][start:end]).startswith("it is 42")
            return {**response, "reward": 1.0, "scores": 0.5, "extra_logs": {"right": 1.0}}

    trajectory = await play(Executor, ["it is 42"])
    assert trajectory.error is None
    assert (trajectory.reward, trajectory.score, trajectory.stop_reason) == (1.0, 0.5, StopReason.TERMINATED)
    assert trajectory.turns[0].result.info["right"] == 1.0


@pytest.mark.parametrize(("reward", "score"), [(1.0, 0.0), (-0.1, 0.0), (0.0, 0.0), (0.0, None), (1.0, None)])
async def test_a_single_turn_executor_keeps_the_score_that_its_subclass_sets(reward, score):
    class Executor(SingleTurnAgentExecutor):
        async def execute(self, *args, **kwargs):
            response = await super().execute(*args, **kwargs)
            response["reward"], response["scores"] = reward, score
            return response

    trajectory = await play(Executor)
    assert (trajectory.reward, trajectory.score) == (reward, score)


@pytest.mark.parametrize(
    ("changes", "score"), [({"reward": 1.0}, 0.0), ({"reward": 1.0, "scores": 0.0}, 0.0), ({}, None)]
)
async def test_the_score_of_an_override_that_changes_the_reward_is_openrlhfs(changes, score):
    class Unscored:
        def step(self, states):
            return {"rewards": 0.0, "environment_feedback": "", "done": True}

    class Executor(AgentExecutor):
        def __init__(self):
            super().__init__(Unscored)

        async def execute(self, *args, **kwargs):
            return {**await super().execute(*args, **kwargs), **changes}

    assert (await play(Executor)).score == score


async def test_a_single_turn_executor_asks_the_reward_function_that_it_is_given(tmp_path):
    (tmp_path / "judge.py").write_text(
        "def reward_func(queries, prompts, labels):\n"
        "    assert queries[0].startswith(prompts[0])\n"
        "    return {'rewards': [float(labels[0] in queries[0])], 'scores': [0.25], 'extra_logs': {'n': [3.0]}}\n"
    )

    class Executor(SingleTurnAgentExecutor):
        def __init__(self):
            super().__init__(str(tmp_path / "judge.py"))

    trajectory = await play(Executor, ["it is 42"])
    assert (trajectory.reward, trajectory.score, trajectory.turns[0].result.info) == (1.0, 0.25, {"n": 3.0})
