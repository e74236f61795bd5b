from agents import Agent, Runner, function_tool


@function_tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


agent = Agent(name="adder", instructions="Be brief.", tools=[add])
print(Runner.run_sync(agent, "Add 1 and 2, then 3 and 4.").final_output)
