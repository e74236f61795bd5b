from strands import Agent, tool
from strands.models.openai import OpenAIModel


@tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


agent = Agent(model=OpenAIModel(model_id="policy"), tools=[add])
agent("Add 1 and 2, then 3 and 4.")
