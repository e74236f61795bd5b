from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


agent = create_agent(ChatOpenAI(model="policy"), tools=[add], name="adder")
state = agent.invoke({"messages": [("user", "Add 1 and 2, then 3 and 4.")]})
print(state["messages"][-1].content)
