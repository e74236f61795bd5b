import asyncio
import os

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


async def main():
    llm = OpenAILike(
        model="policy",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        is_chat_model=True,
        is_function_calling_model=True,
    )
    print(await FunctionAgent(tools=[add], llm=llm).run("Add 1 and 2, then 3 and 4."))


asyncio.run(main())
