"""Where no model is named, the chat template renders tools: one environment, every way to run it."""

import agentenv
from agentenv import AgentInstance, ScriptedEngine, StepResult, Task
from agentenv.testing import Setup, ToollessTokenizer, play
from agentenv.testing.fixtures import Bench
from agentenv.testing.tool_calls import call_text
from agentenv.tools import answer_calls

ROWS = [{"prompt": "How much is it?", "label": "7"}]
ACTIONS = [call_text("price", {"item": "tea"}), "7"]
PRICE = {"type": "function", "function": {"name": "price", "parameters": {
    "type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}}}  # fmt: skip


class Shop(AgentInstance):
    """One call, one answer."""

    async def reset(self, states):
        assert states["renders_tools"]
        return {**states, "tools": [PRICE]}

    async def step(self, states):
        if states["tool_calls"].items:
            return StepResult(await answer_calls(states["tool_calls"], {"price": self.price}), score=0.0)
        right = states["action_text"] == states["label"]
        return StepResult(reward=float(right), score=float(right), terminated=True)

    async def price(self, item: str) -> str:
        return "7"


def check(trajectory):
    assert trajectory.error is None, trajectory.error.message
    assert trajectory.reward == 1.0
    assert trajectory.turns[0].result.observation[0]["role"] == "tool"


def test_rollout_with_a_scripted_engine_offers_tools():
    check(agentenv.rollout(Shop, ROWS, engine=ScriptedEngine(ACTIONS), progress="none")[0])


def test_the_mark_and_the_fixtures_of_pytest_offer_tools():
    task = Task([{"role": "user", "content": "How much is it?"}], label="7")
    check(Bench.of_marker(((Shop, ACTIONS), {"data": task})).marked_episode())
    check(Bench().run_episode(Shop, Bench().scripted_engine(ACTIONS), data=task))


async def test_a_setup_takes_the_tokenizer_of_its_engine():
    check(await play(Setup(Shop, ScriptedEngine(ACTIONS), data=Task([{"role": "user", "content": "?"}], label="7"))))


async def test_a_template_that_renders_no_tools_is_named_with_what_to_do():
    class Asks(Shop):
        async def reset(self, states):
            return {**states, "tools": [PRICE]}

    data = Task([{"role": "user", "content": "?"}], label="7")
    trajectory = await play(Setup(Asks, ACTIONS, data=data, tokenizer=ToollessTokenizer()))
    assert "states['renders_tools']" in trajectory.error.message
