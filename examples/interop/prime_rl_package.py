"""verifiers' own rollout of math_retry: a module is written, loaded and played; a server says what is scripted.

It needs agentenv-rl[verifiers]. prime-rl trains on the same module, as a package with an rl.toml.

    python examples/interop/prime_rl_package.py

expected last line: reward 1.0, of turns [0.0, 1.0]
"""

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

MODULE = """
from agentenv.interop.verifiers_env import env_package

EnvTaskset, EnvHarness, EnvOfOne = env_package("math_retry", "word_problems_train")

__all__ = ["EnvHarness", "EnvOfOne", "EnvTaskset"]
"""
ANSWERS = ["#### 41", "#### 216"]


async def complete(request: Any) -> Any:
    """Answer as a model would, with the next scripted text."""
    from aiohttp import web

    turn = sum(message["role"] == "assistant" for message in (await request.json())["messages"])
    message = {"role": "assistant", "content": ANSWERS[turn]}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
    body = {"id": "example", "object": "chat.completion", "created": 0, "model": "policy", "usage": usage}
    return web.json_response({**body, "choices": [choice]})


async def main() -> None:
    from aiohttp import web
    from verifiers.v1.clients import EvalClientConfig, ModelContext
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    env = load_environment(resolve_env_config({"taskset": {"id": "agentenv-math-retry"}}))
    async with env.serving():
        context = ModelContext(model="policy", client=EvalClientConfig(base_url=url, api_key_var="NO_KEY"))
        episode = await env.run_episode(next(iter(env.taskset)), context)
    await runner.cleanup()
    (trace,) = episode.traces
    print(f"reward {trace.reward}, of turns {trace.info['agentenv']['turn_rewards']}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as path:
        Path(path, "agentenv_math_retry.py").write_text(MODULE)
        sys.path.insert(0, path)
        asyncio.run(main())
