import os

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: a number
        b: another
    """
    return a + b


model = OpenAIServerModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
print(ToolCallingAgent(tools=[add], model=model).run("Add 1 and 2, then 3 and 4."))
