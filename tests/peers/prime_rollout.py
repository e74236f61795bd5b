"""verifiers' own rollouts of packages as the page on prime-rl has them, with tiny-math on the CPU; prints JSON.

verifiers' own: `load_environment`, `Env.run_episode`, its interception server, its client for training and renderers.
Ours is the server of tokens that the client asks, in place of vLLM. Where prime-rl's code is on the path, its own
GRPO, `trace_to_samples` and `prepare_batch` follow.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.clients import ModelContext, TrainClientConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from agentenv import Chat, Completion, Limits, SamplingParams, StepResult, Task, run_episode
from agentenv.core.dataset import in_messages
from agentenv.core.engine import Engine
from agentenv.engines.hf.engine import HFEngine
from agentenv.engines.models import load_tokenizer
from agentenv.episode.registry import load_env
from agentenv.episode.setup import EpisodeKey
from agentenv.errors import EngineError
from agentenv.interop.verifiers_env import INFO, env_package
from agentenv_envs.math_retry import MathRetry
from tests.peers.rollout_parts import DATA, GROUP, MODEL, NUM_TASKS
from tests.peers.where import page_block

MAX_TOKENS = 48
CALL = '<tool_call>{"arguments":  {"expression": "6 * 7"}, "name": "calculator"}</tool_call>'
"""Not as the template writes it: rendered again it would have other tokens."""
RENDERER = {"name": "custom", "import_path": "agentenv.interop.verifiers_renderer.ChatRenderer"}

PLAYED = {}
"""The environment, the task and the number of the sibling of each trace, by its id."""
SAMPLED = defaultdict(dict)
"""What the server answered, by the trace's id and the prompt's tokens."""
COUNTS = Counter()


class Paying(MathRetry):
    """Math_retry, whose siblings pay 1, 2 and 4 or are right, of which each fourth fails; the last word pays 0.25."""

    async def reset(self, states):
        self.pay = COUNTS[states["label"]] % GROUP
        COUNTS[states["label"]] += 1
        return await super().reset(states)

    async def step(self, states):
        if states["label"] == "right" and self.pay != 3:
            return StepResult(reward=1.0, info={"num": 1}, terminated=True)
        if states["label"] == "right" or (states["turn_index"] and states["label"] == "pays" and self.pay == 3):
            raise RuntimeError("one of four")
        is_last = states["label"] == "pays" and states["turn_index"] == 1
        reward = float(self.pay or 4) if is_last else 0.5
        text = [] if is_last else [{"role": "user", "content": "Again."}]
        return StepResult(text, reward=reward, info={"num": 1, "why": "no"}, terminated=is_last)

    async def on_truncate(self, states):
        return StepResult(reward=0.25)


def written(trace_id, turn):
    """What the policy says instead of sampling: the second sibling is right, the third later."""
    name, task, sibling = PLAYED.get(trace_id) or ("", None, 0)
    if sibling == 2 and turn == 0 and name == "tool_use":
        return CALL
    if sibling == 1 or (sibling == 2 and turn):
        return f"#### {task.data.label.removeprefix('#### ')}"
    return None


class Server:
    """vLLM's `/inference/v1/generate`, in the form that renderers 0.1.12 reads."""

    def __init__(self):
        self.engine, self.tokenizer = HFEngine(MODEL, dtype="float32"), load_tokenizer(MODEL)

    async def generate(self, request):
        asked, trace_id = await request.json(), request.headers["X-Session-ID"]
        turn, ids = len(SAMPLED[trace_id]), asked["token_ids"]
        said = written(trace_id, turn)
        if said is None:
            sampling = SamplingParams(max_tokens=asked["sampling_params"]["max_tokens"])
            made = await self.engine.generate(ids, sampling, request_id=f"{trace_id}/{turn}")
            tokens, logprobs, reason = list(made.token_ids), list(made.logprobs), made.finish_reason
        else:
            tokens = [*self.tokenizer.encode(said, add_special_tokens=False), self.tokenizer.eos_token_id]
            logprobs, reason = [-0.5] * len(tokens), "stop"
        SAMPLED[trace_id][tuple(ids)] = tokens, logprobs, reason
        content = [{"token": f"token_id:{i}", "logprob": p} for i, p in zip(tokens, logprobs, strict=True)]
        choice = {"index": 0, "finish_reason": reason, "token_ids": tokens, "logprobs": {"content": content}}
        return web.json_response({"request_id": "r", "choices": [choice]})

    async def models(self, request):
        return web.json_response({"object": "list", "data": [{"id": "policy", "max_model_len": 2048}]})

    @contextlib.asynccontextmanager
    async def running(self):
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self.generate)
        app.router.add_get("/v1/models", self.models)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            await runner.cleanup()


class Replay(Engine):
    """Answers our loop as the server answered verifiers, where the tokens before are the same."""

    def __init__(self, trace_id):
        self.answers, self.tokenizer = SAMPLED[trace_id], load_tokenizer(MODEL)

    async def generate(self, prompt_token_ids, sampling, *, request_id):
        if tuple(prompt_token_ids) not in self.answers:
            raise EngineError("verifiers asked after other tokens")
        tokens, logprobs, reason = self.answers[tuple(prompt_token_ids)]
        return Completion(tuple(tokens), reason, logprobs=tuple(logprobs))


def as_verifiers_offers(cls):
    """The environment, whose tools lack the type of the result: verifiers' own class of tools has no place for it."""

    class Offered(cls):
        async def reset(self, states):
            states = await super().reset(states)
            for tool in states.get("tools") or ():
                tool["function"].pop("return", None)
            return states

    return Offered


async def ours(trace, name):
    """The trajectory of the same episode in our own loop."""
    data, engine = trace.task.data, Replay(trace.id)
    task = in_messages(Task(data.prompt, data.label, data.id, metadata=data.metadata))
    cls = as_verifiers_offers(load_env(name))
    limits = Limits(max_length=2048, max_turns=cls.max_turns or 16)
    key = EpisodeKey(trace.id, data.id, seed=data.seed)
    return await run_episode(cls, task, engine=engine, chat=Chat(engine.tokenizer), limits=limits, key=key)


def compared(trace, trajectory):
    """What verifiers recorded, beside our trajectory."""
    segment, end = trajectory.segments[0], trajectory.turns[-1].end
    branch = trace.branches[0]
    return {
        "ok": trace.ok,
        "num_branches": len(trace.branches),
        "num_turns": trace.num_turns,
        "num_segments": len(trajectory.segments),
        "equal": {
            "tokens": branch.token_ids == segment.token_ids[:end].tolist(),
            "mask": branch.sampled_mask == [bool(one) for one in segment.action_mask[:end]],
            "logprobs": np.float32(branch.logprobs).tolist() == segment.logprobs[:end].tolist(),
            "reward": trace.reward == trajectory.reward,
            "turn_rewards": trace.info[INFO]["turn_rewards"] == [turn.result.reward for turn in trajectory.turns],
        },
        "num_asked": len(SAMPLED[trace.id]),
        "reward": trace.reward,
        "metrics": trace.metrics,
        "roles": [message.role for message in trace.messages],
        "stop_reason": trace.info[INFO]["stop_reason"],
    }


async def episodes(server, name, agent=None, tasks=None):
    """Let verifiers run the siblings of the first tasks of a package; return their episodes, group by group."""
    env = load_environment(resolve_env_config({"taskset": {"id": name}, **({"agent": agent} if agent else {})}))
    chosen = tasks or list(env.taskset)[:NUM_TASKS]
    async with server.running() as url, env.serving():
        client = TrainClientConfig(base_url=url, api_key_var="NO_KEY", renderer=RENDERER, renderer_model_name=MODEL)
        sampling = vf.SamplingConfig(temperature=1.0, max_tokens=MAX_TOKENS)
        context = ModelContext(model="policy", client=client, sampling=sampling)

        def one(task, sibling):
            def named(trace):
                PLAYED[trace.id] = name.removeprefix("agentenv-").replace("-", "_"), task, sibling

            return env.run_episode(task, context, on_trace=named)

        return [await asyncio.gather(*(one(task, sibling) for sibling in range(GROUP))) for task in chosen]


async def prime_rows(groups, trajectories):
    """What prime-rl makes of groups of episodes, which its orchestrator gets over a wire: a row for each sample."""
    from prime_rl.configs.algorithm import GRPOAlgoConfig
    from prime_rl.orchestrator.algo.grpo import GRPOAlgorithm
    from prime_rl.orchestrator.trajectories import trace_to_samples
    from prime_rl.trainer.batch import prepare_batch

    rows = []
    for group in groups:
        got = [vf.WireEpisode.model_validate(episode.model_dump()) for episode in group]
        await GRPOAlgorithm(GRPOAlgoConfig(), None).score_group(got)
        mean = np.mean([trajectories[each.traces[0].id].reward for each in group])
        for episode in got:
            (trace,) = episode.traces
            ours = trajectories[trace.id]
            segment, end = ours.segments[0], ours.turns[-1].end
            (sample,) = trace_to_samples(trace, env_name="ours")
            sample.temperatures = [1.0] * len(sample.token_ids)
            ((batch,),) = prepare_batch([sample], 2048, 1, len)
            ids, mask = segment.token_ids[:end].tolist(), [bool(one) for one in segment.action_mask[:end]]
            wanted = [(ours.reward - mean) * one for one in mask]
            rows.append(
                {
                    "equal": {
                        "tokens": sample.token_ids == batch.input_ids[:end] == ids,
                        "mask": sample.mask == batch.loss_mask[:end] == mask,
                        "logprobs": np.float32(sample.logprobs).tolist() == segment.logprobs[:end].tolist(),
                    },
                    "num_after": sum(map(bool, batch.loss_mask[end:])),
                    "advantage_gap": max(abs(a - b) for a, b in zip(sample.advantages, wanted, strict=True)),
                    "advantage": ours.reward - mean,
                }
            )
    return rows


async def failures(server):
    """Episodes of which some fail, some meet verifiers' own limit of turns, and some have a prompt that is too long."""
    module = ModuleType("paying")
    module.Taskset, module.Harness, module.Env = env_package(Paying, "tasks.jsonl")
    module.__all__ = ["Taskset", "Harness", "Env"]
    sys.modules["paying"] = module
    rows = [{"prompt": "Say.", "label": word} for word in ("pays", "cut", "right")]
    rows.append({"prompt": "x" * 5000, "label": "long"})
    with open("tasks.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    tasks = list(load_environment(resolve_env_config({"taskset": {"id": "paying"}})).taskset)
    groups = await episodes(server, "paying", {"max_turns": 3}, tasks)
    answers = {}
    for task, group in zip(tasks, groups, strict=True):
        traces = [episode.traces[0] for episode in group]
        answers[task.data.label] = {
            "ok": [episode.ok for episode in group],
            "rewards": [{key: each and each.score for key, each in trace.rewards.items()} for trace in traces],
            "errors": [[f"{error.type}: {error.message}" for error in trace.errors] for trace in traces],
            "info": traces[0].info,
            "metrics": traces[0].metrics,
        }
        if find_spec("prime_rl"):
            answers[task.data.label]["advantages"] = await prime_advantages(group)
            kept = [episode for episode in group if episode.ok]
            zero = [each.model_copy(deep=True) for each in kept[:1]]
            for each in zero:
                each.traces[0].rewards = {}
            answers[task.data.label]["zero"] = await prime_advantages([*kept, *zero]) if kept else []
    return answers


async def prime_advantages(group):
    """The advantage of each training sample that prime-rl makes of a group, at its first sampled token."""
    from prime_rl.configs.algorithm import GRPOAlgoConfig
    from prime_rl.orchestrator.algo.base import iter_trainable_traces
    from prime_rl.orchestrator.algo.grpo import GRPOAlgorithm
    from prime_rl.orchestrator.trajectories import trace_to_samples

    await GRPOAlgorithm(GRPOAlgoConfig(), None).score_group(group)
    samples = [sample for _, trace in iter_trainable_traces(group) for sample in trace_to_samples(trace)]
    return [sample.advantages[sample.mask.index(True)] for sample in samples]


async def evaluated(server):
    """What `vf-eval` writes of two tasks, in a process of its own that knows the package by its folder alone."""
    async with server.running() as url:
        words = ["agentenv-guess-number", "--no-push", "--no-rich", "-n", "2", "-r", "1", "--model", "policy"]
        words += ["--client.type", "train", "--client.base-url", url, "--client.api-key-var", "NO_KEY"]
        words += ["--client.renderer-model-name", MODEL, "--sampling.max-tokens", str(MAX_TOKENS)]
        for name, value in RENDERER.items():
            words += [f"--client.renderer.{name.replace('_', '-')}", value]
        path = os.pathsep.join([str(Path("guess-number").resolve()), os.environ["PYTHONPATH"]])
        code, environment = "from verifiers.v1.cli.eval.main import main; main()", {**os.environ, "PYTHONPATH": path}
        command = [sys.executable, "-c", code, *words, "-o", "evaluated"]
        with open("evaluated.log", "w") as log:
            done = await asyncio.create_subprocess_exec(*command, env=environment, stdout=log, stderr=log)
            assert await done.wait() == 0, Path("evaluated.log").read_text()[-3000:]
    (file,) = Path("evaluated").rglob("traces.jsonl")
    made = [vf.WireEpisode.model_validate_json(line) for line in file.read_text().splitlines()]
    return [[episode.ok, len(episode.traces[0].branches), episode.traces[0].num_turns] for episode in made]


async def main():
    server, answers = Server(), {"prime": {}} if find_spec("prime_rl") else {}
    for name, data in DATA.items():
        folder = name.replace("_", "-")
        block = page_block("prime-rl.md", "env_package").replace("word_problems_train", data)
        written = block.replace("math_retry", name).replace("math-retry", folder)
        subprocess.run(["bash", "-e", "-c", written], check=True)
        sys.path.insert(0, folder)
        groups = await episodes(server, f"agentenv-{folder}")
        traces = [trace for group in groups for episode in group for trace in episode.traces]
        trajectories = {trace.id: await ours(trace, name) for trace in traces}
        answers[name] = [compared(trace, trajectories[trace.id]) for trace in traces]
        if "prime" in answers:
            answers["prime"][name] = await prime_rows(groups, trajectories)
    answers["failures"] = await failures(server)
    answers["evaluated"] = await evaluated(server)
    if "prime" in answers:
        from prime_rl.configs.rl import RLConfig

        with open("math-retry/rl.toml", "rb") as file:
            config = RLConfig.model_validate(tomllib.load(file))
        (source,) = config.orchestrator.train.source
        renderer = config.orchestrator.renderer
        env = source.env
        answers["config"] = [env.taskset.id, env.agent.runtime.type, env.agent.retries.max_retries]
        answers["config"] += [source.group_size, renderer.name]
    print("\n" + json.dumps(answers))


if __name__ == "__main__":
    asyncio.run(main())
