import asyncio

from agents import Agent, Runner, function_tool


@function_tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


async def main() -> None:
    result = Runner.run_streamed(Agent(name="adder", tools=[add]), "Add 1 and 2, then 3 and 4.")
    async for _ in result.stream_events():
        pass
    print(result.final_output)


asyncio.run(main())
