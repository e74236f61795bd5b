from crewai import LLM, Agent
from crewai.tools import tool


@tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


agent = Agent(role="Adder", goal="Add.", backstory="Exact.", llm=LLM(model="policy", provider="openai"), tools=[add])
print(agent.kickoff("Add 1 and 2, then 3 and 4.").raw)
