import os

from anthropic import Anthropic

client = Anthropic(base_url=os.environ["OPENAI_BASE_URL"].removesuffix("/v1"), api_key=os.environ["OPENAI_API_KEY"])
client.messages.create(model="policy", max_tokens=64, messages=[{"role": "user", "content": "Add 1 and 2."}])
