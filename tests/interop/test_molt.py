"""Environments of ours inside Molt, and Molt's agent files in our runs; Molt's own code is in tests/with_molt."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentenv.chat.chat import Chat, ChatOptions
from agentenv.core.agent import AgentInstance
from agentenv.core.types import Limits, SamplingParams, StepResult, StopReason, Task
from agentenv.engines.scripted import ScriptedEngine
from agentenv.episode.setup import EpisodeKey, EpisodeSetup
from agentenv.errors import ConfigError, InfraError
from agentenv.interop.agent_files import load_agent_func
from agentenv.interop.molt import AgentRunner
from agentenv.interop.openrlhf.executor import AgentFunc
from agentenv.testing.tokenizers import CharTokenizer
from tests.episode.endpoint.scenes import chat_of
from tests.testing.contract_check import check
from tests.with_molt import fakes
from tests.with_molt.fakes import Router, rollout
from tests.with_openrlhf.fakes import Params

ROOT = Path(__file__).parents[2]
USER = [{"role": "user", "content": "1 + 1?"}]
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
ENDS = StepResult(reward=1.0, terminated=True)


@pytest.fixture
def molt(monkeypatch):
    """Molt's base module, imported, as it is wherever Molt loads a file."""
    monkeypatch.setitem(sys.modules, "molt.agents.base", fakes.base())


def runner(*replies, first=None, **attributes):
    """A runner whose agents answer with these in turn; its `agents` are those it made."""
    agents = []

    class Agent(AgentInstance):
        def __init__(self):
            self.seen = []
            agents.append(self)

        async def reset(self, states):
            self.reset_with = states
            return states if first is None else {**states, **first}

        async def step(self, states):
            self.seen.append(states)
            reply = replies[min(len(self.seen), len(replies)) - 1]
            if isinstance(reply, Exception):
                raise reply
            return reply

    made = type("AgentRunner", (AgentRunner,), {"agent_cls": Agent, **attributes})()
    made.agents = agents
    return made


# --- ours inside Molt -----------------------------------------------------------------------------------------------


def test_molts_loader_takes_the_runner_of_a_file_of_ours(molt):
    spec = importlib.util.spec_from_file_location("agent_module", ROOT / "agent_funcs/math_retry.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # as Molt loads it: in no sys.modules
    assert issubclass(module.AgentRunner, fakes.Runner)
    assert module.AgentRunner().PRERENDER_PROMPT is False
    assert not issubclass(module.AgentExecutor, fakes.Runner)


async def test_a_first_action_that_the_limit_cut_makes_molts_trajectory_truncated(molt):
    """As Molt's own runner does; OpenRLHF's looks at the last action."""
    llm = Router(lambda ids: "a long answer" if len(ids) < 10 else "b")
    got = await rollout(runner(StepResult("no\n"), ENDS), llm, params=Params(max_tokens=4))
    assert (got.reward, got.truncated) == (1.0, True)


@pytest.mark.long
async def test_an_episode_is_molts_trajectory(molt):
    made = runner(StepResult("no\n", reward=0.25, info={"tries": 1}), ENDS, logs={"tries": "sum"})
    llm = Router("ab", logprob=-0.75)
    got = await rollout(made, llm, prompt="prompt", label="l")
    ids = got.observation_tokens
    assert isinstance(got, fakes.Trajectory)
    assert CharTokenizer().decode(ids) == "promptab<|im_end|>no\nab<|im_end|>"
    assert [ids[start:end] for start, end in got.action_ranges] == [[*CharTokenizer().encode("ab"), 0]] * 2
    acted = {i for start, end in got.action_ranges for i in range(start, end)}
    assert got.rollout_log_probs == [-0.75 if i in acted else 0.0 for i in range(len(ids))]
    assert (got.reward, got.scores, got.truncated) == (1.25, 1.25, False)
    assert got.extra_logs == {"num_turns": 2.0, "failed": 0.0, "failed_alone": 0.0, "tries": 1.0}
    assert (got.prompt, got.label, got.images, got.off_policy_action_lens) == ("prompt", "l", None, [0, 0])
    assert (got.routed_experts, got.rollout_top_logprobs, got.mm_train_inputs) == (None, None, None)


async def test_the_rows_messages_are_rendered_once_and_the_environment_sees_them(molt):
    made = runner(StepResult("again", reward=0.0), ENDS)
    got = await rollout(made, Router("ab"), prompt=USER)
    assert made.agents[0].reset_with["observation"] == USER
    head = "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    more = "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    assert CharTokenizer().decode(got.observation_tokens) == f"{head}ab<|im_end|>{more}ab<|im_end|>"


async def test_every_turn_of_an_episode_has_its_sessions_id_and_siblings_have_others(molt):
    made, llm = runner(StepResult("no"), StepResult("no"), ENDS), Router("ab")
    await asyncio.gather(*(rollout(made, llm) for _ in range(3)))
    assert sorted(llm.sessions.count(session) for session in set(llm.sessions)) == [3, 3, 3]


async def test_an_episode_that_runs_again_has_the_stale_tokens_of_its_last_attempt(molt, virtual_clock):
    answers = iter(["abcd", RuntimeError("down"), "abcd", "abcd"])
    made, llm = runner(StepResult("no"), ENDS), Router(lambda _: next(answers), stale=[3, 1, 2])
    got = await rollout(made, llm)
    assert (len(made.agents), got.off_policy_action_lens) == (2, [1, 2])


async def test_stale_tokens_at_an_actions_beginning_are_counted_for_molt_and_have_an_older_version(molt, monkeypatch):
    made = runner(StepResult("no"), StepResult("no"), ENDS)
    kept = []

    async def reported(call, trajectory, response, problem):
        kept.append(trajectory)

    monkeypatch.setattr(made, "_report", reported)
    got = await rollout(made, Router("abcd", stale=[0, 2, 3]))
    assert got.off_policy_action_lens == [0, 2, 3]
    versions = kept[0].segments[0].policy_versions
    acted = [versions[start:end].tolist() for start, end in got.action_ranges]
    assert acted == [[0, 0, 0, 0, 0], [0, 0, 1, 1, 1], [1, 1, 1, 2, 2]]


async def test_fields_of_molts_engine_other_than_tokens_reach_its_trajectory(molt):
    top = ("ids", "log-probabilities")
    got = await rollout(runner(StepResult("no"), ENDS), Router("ab", routed_experts="rows", top_logprobs=top))
    assert got.routed_experts == ["rows", "rows"]
    assert got.rollout_top_logprobs == [top, top]


@pytest.mark.parametrize(
    ("reply", "changes", "told"),
    [
        (RuntimeError("lost"), {}, r"step at .*: RuntimeError: lost\."),
        (ENDS, {"script": RuntimeError("down")}, "down"),
        (ENDS, {"logprobs": None}, "no log-probability"),
    ],
    ids=["environment", "engine", "log-probabilities"],
)
async def test_a_failed_episode_raises_so_that_molt_drops_it(molt, reply, changes, told):
    with pytest.raises(InfraError, match=told):
        await rollout(runner(reply), Router(**{"script": "ab", **changes}))


async def test_a_failed_episode_may_stay_in_its_group_as_a_neutral_sample(molt):
    made = runner(RuntimeError("lost"), on_error="mask", failed_reward=-1.0)
    got = await rollout(made, Router("ab"))
    assert [end - start for start, end in got.action_ranges] == [1]
    assert (got.reward, got.extra_logs["failed"]) == (-1.0, 1.0)
    assert len(got.rollout_log_probs) == len(got.observation_tokens)


async def test_a_history_that_is_rendered_again_is_a_list_of_segments_with_the_episodes_reward(molt):
    replies = [StepResult("more", reward=0.25), StepResult("and more", reward=0.5), ENDS]
    made = runner(*replies, chat_options=ChatOptions(history="rerender"))
    tokenizer = chat_of("Qwen3").tokenizer
    said = tokenizer.encode("<think>\nhm\n</think>\n\none<|im_end|>", add_special_tokens=False)
    got = await rollout(
        made, Router("x", token_ids=said, stale=[0, 1, 0]), prompt=USER, tokenizer=tokenizer, max_length=2000
    )
    assert [len(each.action_ranges) for each in got] == [1, 1, 1]
    assert [each.reward for each in got] == [each.scores for each in got] == [1.75] * 3
    assert [each.off_policy_action_lens for each in got] == [[0], [1], [0]]
    for each in got:
        ((start, end),) = each.action_ranges
        assert each.observation_tokens[start:end] == said
        assert len(each.rollout_log_probs) == len(each.observation_tokens)
        assert each.extra_logs["num_turns"] == 3.0
    texts = [tokenizer.decode(each.observation_tokens[: each.action_ranges[0][0]]) for each in got]
    assert ["more" in text for text in texts] == [False, True, True]


async def test_the_rows_tools_are_offered_unless_the_environment_offers_its_own(molt):
    tokenizer = chat_of("Qwen3").tokenizer
    said = tokenizer.encode("one<|im_end|>", add_special_tokens=False)
    own = {"type": "function", "function": {**TOOL["function"], "name": "listen"}}
    texts = []
    for first in (None, {"tools": [own]}):
        made = runner(ENDS, first=first)
        got = await rollout(made, Router("x", token_ids=said), prompt=USER, tokenizer=tokenizer, tools=[TOOL])
        texts.append(tokenizer.decode(got.observation_tokens))
        assert made.agents[0].reset_with["metadata"] == {"tools": [TOOL]}
    assert [("look" in text, "listen" in text) for text in texts] == [(True, False), (False, True)]


async def test_tools_that_molt_rendered_into_the_text_are_not_offered_again(molt):
    made = runner(ENDS)
    got = await rollout(made, Router("ab"), prompt="prompt", tools=[TOOL])
    assert CharTokenizer().decode(got.observation_tokens) == "promptab<|im_end|>"


async def test_a_processor_accepts_a_row_of_text_and_refuses_images(molt):
    processor = SimpleNamespace(image_processor=object(), tokenizer=CharTokenizer())
    assert (await rollout(runner(ENDS), Router("ab"), tokenizer=processor)).reward == 1.0
    with pytest.raises(ConfigError, match="image"):
        await rollout(runner(ENDS), Router("ab"), tokenizer=processor, images=["picture"])


async def test_another_trainers_engine_is_refused_with_what_to_do(molt):
    class Other(Router):
        async def generate(self, *args, **kwargs):
            return (await super().generate(*args, **kwargs))[0]

    with pytest.raises(InfraError, match=r"number of off-policy tokens.*Use the llm_engine that Molt hands"):
        await rollout(runner(ENDS), Other("ab"))


async def test_outside_molt_the_runner_says_so(monkeypatch):
    monkeypatch.delitem(sys.modules, "molt.agents.base", raising=False)  # a stand-in stays where a file was loaded
    with pytest.raises(ConfigError, match="expected Molt to call it"):
        await rollout(runner(ENDS), Router("ab"))


async def test_a_file_with_our_runner_alone_runs_here_too(tmp_path):
    func = loaded(
        tmp_path,
        """
        from agentenv.core.agent import AgentInstance
        from agentenv.interop.molt import AgentRunner as Base
        from agentenv.core.types import StepResult


        class Echo(AgentInstance):
            async def step(self, states):
                return StepResult(reward=float(states["action_text"] == states["label"]), terminated=True)


        class AgentRunner(Base):
            agent_cls = Echo
        """,
    )
    trajectory = await played(func, ["yes"], label="yes", metadata={"tools": [TOOL]})
    assert trajectory.tools == (TOOL,)  # as in Molt, which passes the messages and the tools
    assert (trajectory.reward, trajectory.stop_reason) == (1.0, StopReason.TERMINATED)


# --- Molt's files here ----------------------------------------------------------------------------------------------


async def played(func, said, *, prompt=None, label=None, chat=None, metadata=None):
    """One episode of a file's, with what the model says."""
    chat = chat or Chat(CharTokenizer())
    task = Task(USER if prompt is None else prompt, label, metadata=metadata or {})
    engine, sampling = ScriptedEngine(said, chat.tokenizer), SamplingParams(max_tokens=60)
    return await func.run(task, EpisodeSetup(engine, chat, sampling, Limits(2_000)), EpisodeKey("t/0"))


def written(folder, source, name="agent.py"):
    file = folder / name
    file.write_text(textwrap.dedent(source))
    return str(file)


def loaded(folder, source):
    return load_agent_func(written(folder, source))


ENV = """
    import torch
    from molt.agents import Env, Result, StepEnvRunner


    class Counting(Env):
        def __init__(self):
            self.turn = 0

        async def reset(self, state):
            return {"observation": state["observation"] + "> "}

        async def step(self, state, **kwargs):
            self.turn += 1
            right = torch.tensor(float(state["label"] in state["action_text"]))
            if right or self.turn == 3:
                return Result(reward=right, score=[right, 7.0], observation="dropped", truncated=not right,
                              info={"turns": torch.tensor(float(self.turn)), "note": "t", "odd": {"a": 1}, "none": []})
            return Result(reward=torch.tensor([0.25]), observation="\\nno> ", terminated=False)


    class AgentRunner(StepEnvRunner):
        def __init__(self):
            super().__init__(Counting)
"""


async def test_an_env_of_molts_runs_in_our_loop(tmp_path):
    trajectory = await played(loaded(tmp_path, ENV), ["1", "2"], label="2", prompt="1 + 1")
    assert CharTokenizer().decode(trajectory.token_ids) == "1 + 1> 1<|im_end|>\nno> 2<|im_end|>"
    assert [turn.result.reward for turn in trajectory.turns] == [0.25, 1.0]
    assert (trajectory.score, trajectory.stop_reason) == (1.0, StopReason.TERMINATED)
    assert trajectory.turns[-1].result.info == {"turns": 2.0, "note": "t"}


@pytest.mark.parametrize(
    "imports",
    [
        "import molt.agents\n    Env, Result = molt.agents.Env, molt.agents.base.Result\n"
        "    StepEnvRunner = molt.agents.StepEnvRunner",
        "from molt.agents.base import Env, Result, StepEnvRunner",
        "import molt.agents.base as base\n    Env, Result, StepEnvRunner = base.Env, base.Result, base.StepEnvRunner",
    ],
)
async def test_molts_names_are_found_by_every_way_of_importing_them(tmp_path, imports):
    source = ENV.replace("from molt.agents import Env, Result, StepEnvRunner", imports)
    assert (await played(loaded(tmp_path, source), ["2"], label="2")).reward == 1.0


async def test_an_env_that_cuts_its_episode_has_truncated_it_though_terminated_is_molts_default(tmp_path):
    trajectory = await played(loaded(tmp_path, ENV), ["1"], label="2", prompt="1 + 1")
    assert (len(trajectory.turns), trajectory.stop_reason) == (3, StopReason.TRUNCATED_BY_ENV)


async def test_messages_are_rendered_for_an_env_as_molts_data_set_does(tmp_path):
    trajectory = await played(loaded(tmp_path, ENV), ["2"], label="2")
    text = CharTokenizer().decode(trajectory.token_ids)
    assert text.startswith("<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n> 2")


NO_RESULT = ENV.replace("return Result(reward=torch", "return dict(reward=torch")


async def test_a_step_that_returns_no_result_is_a_contract_error(tmp_path):
    trajectory = await played(loaded(tmp_path, NO_RESULT), ["1"], label="2", prompt="1 + 1")
    assert (trajectory.error.kind, trajectory.error.where) == ("contract", "step")
    assert "Counting.step: expected molt.agents.Result, got dict" in trajectory.error.message


OWN_LOOP = """
    from molt.agents.base import Env, Result, Runner, StepEnvRunner, Trajectory


    class AgentRunner(Runner):
        async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine,
                          images=None, tools=None):
            ids = hf_tokenizer.encode(prompt, add_special_tokens=False)
            made = Trajectory(prompt=prompt, label=label, images=images, observation_text=prompt,
                              observation_tokens=ids, rollout_log_probs=[0.0] * len(ids))
            for _ in range(2):
                out, off_policy = await llm_engine.generate(made.observation_tokens, sampling_params, session_id="s")
                said = out.outputs[0]
                logprobs = [entry[i].logprob for i, entry in zip(said.token_ids, said.logprobs)]
                made.append_action(said.token_ids, logprobs, off_policy_len=off_policy)
                made.append_feedback(said.text, "!", hf_tokenizer.encode("!", add_special_tokens=False))
            made.reward = made.scores = 2.0
            made.extra_logs = {"n": 1, "odd": {}}
            return RETURNED
"""


async def test_a_runner_with_its_own_loop_runs_and_its_trajectory_is_the_record(tmp_path):
    trajectory = await played(loaded(tmp_path, OWN_LOOP.replace("RETURNED", "made")), ["a", "b"], prompt="p")
    assert trajectory.error is None
    assert CharTokenizer().decode(trajectory.token_ids) == "pa<|im_end|>!b<|im_end|>!"
    assert [(turn.start, turn.end) for turn in trajectory.turns] == [(1, 3), (4, 6)]
    assert trajectory.logprobs.tolist() == [0.0, -0.5, -0.5, 0.0, -0.5, -0.5, 0.0]
    assert (trajectory.reward, trajectory.turns[-1].result.info) == (2.0, {"n": 1.0})


@pytest.mark.parametrize("returned", ["[made, made]", "None", "{}"])
async def test_anything_but_a_single_trajectory_is_refused_with_what_to_do(tmp_path, returned):
    trajectory = await played(loaded(tmp_path, OWN_LOOP.replace("RETURNED", returned)), ["a"], prompt="p")
    assert trajectory.error.kind == "contract"
    assert "expected one molt.agents.Trajectory" in trajectory.error.message
    assert "write a ChatAgent, or use agentenv.interop.molt" in trajectory.error.message


async def test_an_execute_that_pays_a_bonus_keeps_the_episodes_turns(tmp_path):
    pays = """
        async def execute(self, *args, **kwargs):
            made = await super().execute(*args, **kwargs)
            made.reward += 0.5
            return made
    """
    trajectory = await played(loaded(tmp_path, ENV + pays), ["1", "2"], label="2", prompt="1 + 1")
    assert [turn.result.reward for turn in trajectory.turns] == [0.25, 1.5]


CHAT = """
    from openai import AsyncOpenAI
    from molt.agents import ChatAgent, ChatAgentRunner, ChatContext, Result


    class Agent(ChatAgent):
        async def run(self, ctx: ChatContext) -> Result:
            async with AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key) as client:
                answer = await client.chat.completions.create(
                    model=ctx.model_name, messages=list(ctx.messages), max_tokens=ctx.sampling_params.max_tokens
                )
            said = answer.choices[0].message.content
            return Result(reward=float(said == ctx.label and ctx.prompt == "1 + 1?"), info={"room": ctx.max_length})


    class AgentRunner(ChatAgentRunner):
        def __init__(self):
            super().__init__(Agent)
"""


async def test_a_chat_agent_of_molts_asks_our_endpoint(tmp_path):
    pytest.importorskip("openai", reason="the file uses OpenAI's SDK")
    trajectory = await played(loaded(tmp_path, CHAT), ["two"], label="two", chat=chat_of("Qwen3"))
    assert (trajectory.error, trajectory.reward, len(trajectory.turns)) == (None, 1.0, 1)
    assert trajectory.turns[0].result.info["room"] == 2_000


async def test_anthropics_wire_is_refused_with_what_to_use(tmp_path):
    source = CHAT.replace("base_url=ctx.base_url", "base_url=ctx.session_url")
    trajectory = await played(loaded(tmp_path, source), ["two"], label="two", chat=chat_of("Qwen3"))
    assert (trajectory.error.kind, trajectory.error.where) == ("contract", "run")
    assert "Use ctx.base_url" in trajectory.error.message


MODULES = """
import sys
from pathlib import Path
sys.path.append(sys.argv[1])
{before}
from agentenv.interop.agent_files import load_agent_func
func = load_agent_func(sys.argv[2])
assert type(func).__name__ == "MoltFunc"
import molt.agents, molt.agents.base
print(molt.agents.OWN, molt.agents.base.OWN)
"""


@pytest.mark.long
@pytest.mark.parametrize("before", ["", "import molt.agents"])
def test_an_installed_molt_is_as_it_was_once_a_file_is_loaded(tmp_path, before):
    package = tmp_path / "site/molt/agents"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text("OWN = 1\nimport molt.agents.base\n")
    (package / "base.py").write_text("OWN = 2\n")
    command = [sys.executable, "-c", MODULES.format(before=before), tmp_path / "site", written(tmp_path, ENV)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "1 2\n"), done.stderr[-2000:]


def test_a_file_with_both_classes_runs_here_by_its_executor():
    func = load_agent_func(ROOT / "agent_funcs/math_retry.py")
    assert type(func) is AgentFunc
    assert not issubclass(func.executor_cls, AgentRunner)


def test_a_chat_agent_is_not_checked_and_the_error_says_how_to_try_it(tmp_path):
    file = written(tmp_path, CHAT.replace("from openai import AsyncOpenAI", ""))
    with pytest.raises(ConfigError, match=r"expected an Env to check, got a ChatAgent.*agentenv run"):
        check(file)


def test_molts_files_are_checked_by_molts_rules(tmp_path):
    sound = written(tmp_path, ENV.replace("torch.tensor([0.25])", "0.25"))
    assert check(sound, label="42", prompt="6 * 7") == []
    (problem,) = check(written(tmp_path, NO_RESULT, "wrong.py"), label="42", prompt="6 * 7")
    assert (problem.where, problem.line) == ("Counting.step", 13)
    assert "molt.agents.Result" in f"{problem.expected} {problem.got}"
