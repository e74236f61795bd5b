import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


async def main() -> None:
    info = {
        "vision": False,
        "function_calling": True,
        "json_output": True,
        "family": "unknown",
        "structured_output": True,
    }
    client = OpenAIChatCompletionClient(model="policy", model_info=info)
    agent = AssistantAgent("adder", model_client=client, tools=[add], max_tool_iterations=5)
    result = await agent.run(task="Add 1 and 2, then 3 and 4.")
    print(result.messages[-1].content)


asyncio.run(main())
