"""Make the records in this folder with the peers' own code: `python make_fixtures.py PEER`, in a venv of that peer.

verl: verl 0.9.1 (`pip install --no-deps verl`): the function that the trainer dumps with, taken out of its file, since
the module imports Ray and CUDA libraries. `3.jsonl` has the trainer's keys, `4.jsonl` those of trainer v1.
prime_rl: verifiers 0.4.0 and prime-rl at 559b447 (its folder `src` in PRIME_RL): `FileMonitor.log_episodes`, with the
modules that it imports replaced by empty ones. `eval/traces.jsonl` is of verifiers' own `write_episode`.
nemo_gym: nemo-gym 0.7.0 (`--ignore-requires-python` on 3.11): `RolloutCollectionHelper.run_from_config`, with
`_run_examples_with_metadata` replaced by one that needs no servers, and rows of its own types.
harbor: harbor 0.26.0 (`--ignore-requires-python` on 3.11): its models of trials and trajectories, written as it does.
"""

import ast
import asyncio
import importlib.util
import json
import os
import shutil
import sys
import types
from pathlib import Path

HERE = Path(__file__).parent


def verl():
    source = Path(importlib.util.find_spec("verl").origin).parent / "trainer/ppo/ray_trainer.py"
    (function,) = (
        node for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "_write_generations"
    )  # fmt: skip
    function.decorator_list.clear()
    space = {"os": os, "json": json}
    exec(compile(ast.Module([function], []), source, "exec"), space)
    asked = ["user\nWhat is 2 + 2?\nassistant\n"] * 2 + ["user\nWhat is 7 - 3?\nassistant\n"] * 2
    said = ["4", "5", "user said 7\nso 4", "<script>alert(1)</script>"]
    extra = {"acc": [True, False, True, False], "pred": ["4", "5", "4", None], "request_id": ["a", "b", "c", "d"]}
    space["_write_generations"](
        asked, said, ["4", "4", "4", "4"], [1.0, 0.0, 1.0, float("nan")], extra, HERE / "verl", 3
    )
    uids = {"uid": ["s0_0_0", "s0_1_0", "s1_0_0"]}
    space["_write_generations"](asked[:3], said[:3], [None] * 3, [0.5, -1.0, 0.25], uids, HERE / "verl", 4)


def prime_rl():
    import verifiers.v1 as vf  # noqa: F401  (first: its modules import each other in this order)
    from verifiers.v1.episode import EnvInfo, Episode, GroupInfo, PolicySpan, TrainRunInfo, TrainWorkInfo
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.task import WireTaskData
    from verifiers.v1.trace import AgentInfo, Error, ModelCall, TimeSpan, Timing, Trace, TraceTask, WireAgentConfig
    from verifiers.v1.types import AssistantMessage, SystemMessage, Tool, ToolCall, ToolMessage, Usage, UserMessage
    from verifiers.v1.utils.trace_store import write_episode

    def node(message, ids, num_sampled=0, parent=None, **fields):
        mask = [False] * (len(ids) - num_sampled) + [True] * num_sampled
        logprobs = [-0.12345 * (k + 1) for k in range(num_sampled)]
        return MessageNode(
            parent=parent, message=message, sampled=num_sampled > 0 or bool(fields.pop("relay", False)), token_ids=ids,
            mask=mask, logprobs=logprobs, timestamp=1000.0, **fields,
        )  # fmt: skip

    task = TraceTask(type="Sums", data=WireTaskData(idx=0, prompt="What is 2 + 2?"), key="sum-0", hash="abc")
    call = ToolCall(id="c0", name="add", arguments='{"a": 2, "b": 2}')

    def nodes(answer, ids):
        return [
            node(SystemMessage(content="Use tools."), [1, 2, 3]),
            node(UserMessage(content="What is 2 + 2?"), [4, 5], parent=0),
            node(AssistantMessage(content="", reasoning_content="Add.", tool_calls=[call]), [6, 7, 8, 9], 3, 1),
            node(ToolMessage(tool_call_id="c0", content="4"), [10, 11], parent=2),
            node(AssistantMessage(content=answer), [6, *ids], len(ids), 3, advantages=[0.5] * len(ids)),
        ]

    def trace(made, rewards, **fields):
        calls = [
            ModelCall(
                node=k, model="m", finish_reason="tool_calls" if k == 2 else "stop",
                usage=Usage(prompt_tokens=5, completion_tokens=3), time=TimeSpan(start=1001.0 + k, end=1001.5 + k),
            )
            for k, each in enumerate(made) if each.sampled
        ]  # fmt: skip
        result = Trace(
            id="t", task=task, agent=AgentInfo(config=WireAgentConfig()), nodes=made, calls=calls,
            tools=[Tool(name="add", parameters={"type": "object"})], timing=Timing(start=1000.0),
            **{"is_completed": True, "ok": True, "stop_condition": "agent_completed", **fields},
        )  # fmt: skip
        for name, (score, weight) in rewards.items():
            result.record_reward(name, score, weight)
        result.record_metric("num_calls", 1.0)
        return result

    def episode(number, *traces, start=7, end=7, **fields):
        policy = PolicySpan(start=start, end=end)
        run = TrainRunInfo(id="r", work=TrainWorkInfo(step=5, policy=policy))
        return Episode(
            id=f"e{number}", env=EnvInfo(id="sums"), task=task, group=GroupInfo(id="g0"), run=run, traces=list(traces),
            **{"ok": True, **fields},
        )  # fmt: skip

    branched = nodes("4", [12, 13])
    branched.append(node(UserMessage(content="Summary: 2 + 2 is 4."), [20, 21]))
    branched.append(node(AssistantMessage(content="So 4"), [6, 22], 1, 5))
    lost = Error(type="SandboxError", message="the sandbox is gone")
    episodes = [
        episode(0, trace(nodes("4", [12, 13]), {"right": (1.0, 1.0), "short": (0.5, 0.2)})),
        episode(1, trace(nodes("5", [14]), {"right": (0.0, 1.0)}, stop_condition="max_turns"), start=6),
        episode(2, trace(branched, {"right": (1.0, 1.0)})),
        episode(3, trace(nodes("4", [12])[:4], {}, ok=False, errors=[lost], stop_condition="sandbox_error"), ok=False),
        episode(4, ok=False, errors=[lost]),
    ]
    empty = {
        "prime_rl.configs.monitors": {"FileMonitorConfig": object}, "prime_rl.utils.config": {"BaseConfig": object},
        "prime_rl.utils.logger": {"get_logger": lambda: None}, "prime_rl.utils.utils": {"sanitize": None},
    }  # fmt: skip
    sys.path.insert(0, os.environ["PRIME_RL"])
    for name in ("prime_rl", "prime_rl.configs", "prime_rl.utils", "prime_rl.monitors"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(Path(os.environ["PRIME_RL"], *name.split(".")))]
    for name, values in empty.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(values)
    from prime_rl.monitors.file import FileMonitor

    shutil.rmtree(HERE / "prime_rl", ignore_errors=True)  # the peer's code appends
    monitor = FileMonitor(None)
    monitor.output_dir = HERE / "prime_rl"
    asyncio.run(monitor.log_episodes(episodes, 5, "train", "all"))
    relayed = [node(UserMessage(content="Hi"), []), node(AssistantMessage(content="Ho"), [], parent=0, relay=True)]
    standalone = Episode(
        id="e9", env=EnvInfo(id="sums"), task=task, traces=[trace(relayed, {"right": (0.25, 1.0)})], ok=True
    )
    (HERE / "prime_rl/eval").mkdir(exist_ok=True)
    write_episode(HERE / "prime_rl/eval", standalone)


def nemo_gym():
    from unittest.mock import patch

    import nemo_gym.rollout_collection as collection
    from nemo_gym.base_resources_server import BaseVerifyResponse
    from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
    from omegaconf import OmegaConf

    params = {
        "input": [{"role": "user", "content": "What is 2 + 2?"}], "instructions": None,
        "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}],
    }  # fmt: skip

    def response(output, **fields):
        return NeMoGymResponse.model_validate({
            "id": "r", "created_at": 1000.0, "model": "m", "object": "response", "output": output, "tools": [],
            "parallel_tool_calls": True, "tool_choice": "auto", **fields,
        })  # fmt: skip

    def tokens(prompt, ids):
        return {
            "prompt_token_ids": prompt, "generation_token_ids": ids,
            "generation_log_probs": [-0.5 * (k + 1) for k in range(len(ids))],
        }  # fmt: skip

    def said(text, **fields):
        part = {"type": "output_text", "text": text, "annotations": []}
        return {"id": "m", "type": "message", "role": "assistant", "content": [part], "status": "completed", **fields}

    thought = {"id": "t", "type": "reasoning", "summary": [{"type": "summary_text", "text": "Add."}]}
    called = {
        "type": "function_call",
        "id": "f",
        "call_id": "c0",
        "name": "add",
        "arguments": "{}",
        "status": "completed",
    }
    told = {"type": "function_call_output", "call_id": "c0", "output": "4"}
    first, second = tokens([1, 2, 3], [4, 5]), tokens([1, 2, 3, 4, 5, 6], [7, 8, 9])
    outputs = [
        ([thought, called | first, told, said("4", **second)], 1.0, {}),
        ([said("5", **tokens([1, 2, 3], [10]))], 0.0, {"mask_sample": True, "failure_kind": "judge_failed"}),
        ([thought, called, told, said("No tokens")], 0.5, {}),
        ([said("cut", status="incomplete")], 0.0, {"incomplete": True}),
    ]

    async def finished(row):
        output, reward, more = outputs[2 * row["_ng_task_index"] + row["_ng_rollout_index"]]
        cut = {"incomplete_details": {"reason": "max_output_tokens"}} if more.pop("incomplete", False) else {}
        asked = NeMoGymResponseCreateParamsNonStreaming.model_validate(params)
        verified = BaseVerifyResponse(
            responses_create_params=asked, response=response(output, **cut), reward=reward, **more
        )
        return collection._CompletedRollout(row, verified.model_dump() | {"accuracy": reward}, None)

    async def failed(row):
        result = collection._agent_request_failure_row(TimeoutError("no answer"), 500)
        return collection._CompletedRollout(row, result, None)

    class Helper(collection.RolloutCollectionHelper):
        def _run_examples_with_metadata(self, rows, *args, **kwargs):
            return [*(finished(row) for row in rows[:4]), failed(rows[4]), failed(rows[0])]

        async def _call_aggregate_metrics(self, *args, **kwargs):
            return None

    folder = HERE / "nemo_gym"
    folder.mkdir(exist_ok=True)
    rows = folder / "inputs.jsonl"
    row = {"responses_create_params": params, "agent_ref": {"type": "responses_api_agents", "name": "simple"}}
    rows.write_text("".join(json.dumps(row | {"n": k}) + "\n" for k in range(3)))
    config = collection.RolloutCollectionConfig(
        input_jsonl_fpath=str(rows), output_jsonl_fpath=str(folder / "rollouts.jsonl"), num_repeats=2,
        agent_name="simple", num_samples_in_parallel=1,
    )  # fmt: skip
    with patch.object(collection, "get_global_config_dict", lambda *a, **k: OmegaConf.create({})):
        asyncio.run(Helper().run_from_config(config))
    for name in ("inputs", "rollouts_materialized_inputs", "quality_summary", "rollout_verdicts"):
        for path in folder.glob(f"{name}.json*"):
            path.unlink()


def harbor():
    import typing

    import typing_extensions

    typing.TypedDict, typing.override = (
        typing_extensions.TypedDict,
        typing_extensions.override,
    )  # Python 3.11 has others
    from harbor.models.agent.context import AgentContext
    from harbor.models.job.result import JobResult, JobStats
    from harbor.models.task.id import LocalTaskId
    from harbor.models.trajectories import (
        Agent,
        Metrics,
        Observation,
        ObservationResult,
        Step,
        ToolCall,
        Trajectory,
    )  # fmt: skip
    from harbor.models.trial.config import TaskConfig, TrialConfig
    from harbor.models.trial.paths import TrialPaths
    from harbor.models.trial.result import AgentInfo, ExceptionInfo, TrialResult
    from harbor.models.verifier.result import VerifierResult
    from harbor.utils.trajectory_utils import format_trajectory_json

    def steps(ids):
        known = ids is not None
        first = Metrics(prompt_tokens=3, completion_tokens=2, cost_usd=0.25, **(
            {"prompt_token_ids": [1, 2, 3], "completion_token_ids": [4, 5], "logprobs": [-0.5, -0.25]} if known else {}
        ))  # fmt: skip
        second = Metrics(prompt_tokens=6, completion_tokens=1, **(
            {"prompt_token_ids": [1, 2, 3, 4, 5, 6], "completion_token_ids": ids, "logprobs": [-1.0] * len(ids)}
            if known else {}
        ))  # fmt: skip
        call = ToolCall(tool_call_id="c0", function_name="bash_command", arguments={"keystrokes": "ls\n"})
        return [
            Step(step_id=1, source="system", message="You use a terminal."),
            Step(step_id=2, source="user", message="Fix it."),
            Step(step_id=3, source="agent", message="Look.", reasoning_content="Hm.", tool_calls=[call], metrics=first,
                 observation=Observation(results=[ObservationResult(source_call_id="c0", content="a.py")])),
            Step(step_id=4, source="agent", message="Done.", metrics=second,
                 observation=Observation(results=[ObservationResult(content="$ ")])),
        ]  # fmt: skip

    job = HERE / "harbor/job"
    lost = ExceptionInfo(
        exception_type="EnvironmentStartTimeoutError", exception_message="no box", exception_traceback="Traceback",
        occurred_at="2026-11-01T00:00:00Z",
    )  # fmt: skip
    slow = lost.model_copy(update={"exception_type": "AgentTimeoutError", "exception_message": "900 s"})
    results = []
    for number, (task, ids, rewards, exception) in enumerate([
        ("fix-it", [7], {"reward": 1.0}, None), ("fix-it", None, {"reward": 0.0, "style": 0.5}, slow),
        ("fix-it", [7, 8], None, lost), ("other", None, {"reward": 1}, None),
    ]):  # fmt: skip
        name = f"{task}__{number}"
        paths = TrialPaths(job / name)
        paths.agent_dir.mkdir(parents=True, exist_ok=True)
        config = TrialConfig(task=TaskConfig(path=Path("tasks") / task), trial_name=name)
        result = TrialResult(
            id=f"00000000-0000-0000-0000-00000000000{number}", task_name=task, trial_name=name, trial_uri="file:///x",
            task_id=LocalTaskId(path=Path("tasks") / task), task_checksum="0", config=config,
            agent_info=AgentInfo(name="terminus-2", version="2.0"), agent_result=AgentContext(n_input_tokens=9),
            verifier_result=None if rewards is None else VerifierResult(rewards=rewards), exception_info=exception,
            started_at="2026-11-01T00:00:00Z",
        )  # fmt: skip
        results.append(result)
        paths.config_path.write_text(config.model_dump_json(indent=4))
        paths.result_path.write_text(result.model_dump_json(indent=4))
        if number != 3:  # an agent that writes no trajectory
            agent = Agent(name="terminus-2", version="2.0", model_name="m")
            made = Trajectory(session_id=f"s{number}", agent=agent, steps=steps(ids))
            (paths.agent_dir / "trajectory.json").write_text(format_trajectory_json(made.to_json_dict()))
    stats = JobStats.from_trial_results(results)
    whole = JobResult(id=results[0].id, started_at="2026-11-01T00:00:00Z", n_total_trials=4, stats=stats)
    (job / "result.json").write_text(whole.model_dump_json(indent=4))
    (job / "config.json").write_text("{}")  # JobConfig; the reader asks only whether it is there


if __name__ == "__main__":
    {"verl": verl, "prime_rl": prime_rl, "nemo_gym": nemo_gym, "harbor": harbor}[sys.argv[1]]()
