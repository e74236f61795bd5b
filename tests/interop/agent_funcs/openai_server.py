# ruff: noqa
# Of the kind of OpenRLHF's OpenAI-server example: the executor serves `llm_engine` over HTTP in a thread of its own, an
# agent talks to that server with OpenAI's SDK, and what the server noted down becomes the response dict.
import asyncio
import socket
import threading
import uuid
from copy import deepcopy

import uvicorn
from openai import AsyncOpenAI
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from openrlhf.utils.agent import AgentExecutorBase


class Server:
    """Chat completions over an `llm_engine`; every answer is noted under the user's name."""

    def __init__(self, llm_engine, tokenizer, max_length):
        self.llm_engine, self.tokenizer, self.max_length = llm_engine, tokenizer, max_length
        self.sampling, self.notes, self.ready = {}, {}, threading.Event()
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = "http://127.0.0.1:%d/v1" % self.socket.getsockname()[1]
        threading.Thread(target=lambda: asyncio.run(self.serve()), daemon=True).start()

    async def serve(self):
        app = Starlette(routes=[Route("/v1/chat/completions", self.complete, methods=["POST"])])
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
        server.install_signal_handlers = lambda: None
        serving = asyncio.create_task(server.serve(sockets=[self.socket]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        self.ready.set()
        await serving

    async def complete(self, request):
        body = await request.json()
        notes = self.notes.setdefault(body["user"], [])
        params = deepcopy(self.sampling[body["user"]])
        tokens, text = [], body["messages"][-1]["content"]
        if notes:
            tokens, text = list(notes[-1][0] + notes[-1][1]), "\n" + text + "\n"
        tokens += self.tokenizer.encode(text, add_special_tokens=False)
        params.max_tokens = min(body["max_tokens"], self.max_length - len(tokens))
        output = (await self.llm_engine.generate(tokens, params)).outputs[0]
        logprobs = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs)]
        notes.append((tokens, list(output.token_ids), logprobs, output.finish_reason))
        message = {"role": "assistant", "content": output.text}
        choice = {"index": 0, "message": message, "finish_reason": output.finish_reason}
        answer = {"id": uuid.uuid4().hex, "object": "chat.completion", "created": 0, "model": "policy"}
        return JSONResponse(answer | {"choices": [choice]})


class AgentExecutor(AgentExecutorBase):
    server = None

    async def agent(self, prompt, label, name):
        messages = [{"role": "user", "content": str(prompt)}]
        async with AsyncOpenAI(base_url=self.server.url, api_key="none", max_retries=0) as client:
            for _ in range(3):
                answer = await client.chat.completions.create(
                    model="policy", messages=messages, max_tokens=64, user=name
                )
                text = answer.choices[0].message.content
                if str(label) in text:
                    return 1.0
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Once more."}]
        return 0.0

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        if self.server is None:
            self.server = Server(llm_engine, hf_tokenizer, max_length)
            assert await asyncio.to_thread(self.server.ready.wait, 60)
        name = uuid.uuid4().hex
        self.server.sampling[name] = sampling_params
        reward = await self.agent(prompt, label, name)
        notes = self.server.notes.pop(name)
        tokens = notes[-1][0] + notes[-1][1]
        log_probs = [0.0] * len(tokens)
        ranges = []
        for before, said, logprobs, _ in notes:
            ranges.append((len(before), len(before) + len(said)))
            log_probs[len(before) : len(before) + len(said)] = logprobs
        return {
            "prompt": prompt,
            "label": label,
            "observation_tokens": tokens,
            "action_ranges": ranges,
            "rollout_log_probs": log_probs,
            "reward": reward,
            "scores": reward,
            "truncated": notes[-1][3] == "length",
            "extra_logs": {"calls": len(notes)},
        }
