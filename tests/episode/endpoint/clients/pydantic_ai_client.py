from pydantic import BaseModel
from pydantic_ai import Agent


class Sums(BaseModel):
    first: int
    second: int


agent = Agent("openai:policy", output_type=Sums)


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


sums = agent.run_sync("Add 1 and 2, then 3 and 4.").output
print(f"The sums are {sums.first} and {sums.second}.")
