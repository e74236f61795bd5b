import os

import dspy


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


lm = dspy.LM("openai/policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], cache=False)
dspy.configure(lm=lm)
print(dspy.ReAct("question -> answer", tools=[add])(question="Add 1 and 2, then 3 and 4.").answer)
