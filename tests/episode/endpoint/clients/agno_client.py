from agno.agent import Agent
from agno.models.openai import OpenAIChat


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


agent = Agent(model=OpenAIChat(id="policy"), tools=[add])
print(agent.run("Add 1 and 2, then 3 and 4.").content)
