"""The names and signatures that others build on: changing one of these tests is changing a promise."""

import dataclasses
import inspect
from importlib import import_module

import pytest

from agentenv.core.agent import AgentInstance
from agentenv.core.engine import Engine
from agentenv.core.types import Completion, Limits, SamplingParams, StepResult, StopReason, Task
from agentenv.episode.loop import run_episode
from agentenv.interop.openrlhf import ResponseDict
from agentenv.interop.openrlhf.executor import AgentExecutor, AgentFunc

FACES = {
    "agentenv": (
        "AgentExecutor AgentInstance Chat ChatOptions Completion Group Limits ResetState Run SamplingParams "
        "ScriptedEngine Segment StepResult StepState StopReason Task Trajectory Turn __version__ arollout errors "
        "load_env load_run read_trajectories rollout run_episode"
    ),
    "agentenv.tools": "ParsedAction PythonTool ToolError Toolset answer_calls schema_of",
    "agentenv.engines": "open_engine resolve_model",
}


@pytest.mark.parametrize("face", FACES)
def test_exported_members(face):
    module = import_module(face)
    assert module.__all__ == sorted(FACES[face].split())
    for name in module.__all__:
        value = getattr(module, name)
        assert name == "__version__" or inspect.getdoc(value), f"{face}.{name} has no docstring"
    with pytest.raises(AttributeError, match="Nothing"):
        module.Nothing  # noqa: B018


def parameters(function):
    """Names in order; `*` before the keyword-only ones; `=` where there is a default."""
    names, seen_star = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not seen_star:
            names, seen_star = [*names, "*"], True
        names.append(parameter.name + ("" if parameter.default is parameter.empty else "="))
    return " ".join(names)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (run_episode, "env task * engine tokenizer= chat= sampling= limits= key="),
        (AgentInstance.reset, "self states"),
        (AgentInstance.step, "self states"),
        (AgentInstance.on_truncate, "self states"),
        (AgentInstance.close, "self"),
        (Engine.generate, "self prompt_token_ids sampling * request_id"),
        (AgentExecutor.execute, "self prompt label sampling_params max_length= hf_tokenizer= llm_engine= images="),
        (AgentFunc.run, "self task setup key"),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_coroutines_keep_their_signatures(function, expected):
    assert inspect.iscoroutinefunction(function)
    assert parameters(function) == expected


def test_the_executors_constructor_keeps_openrlhfs_keywords():
    names = "self agent_instance_cls= max_steps= max_length= llm_engine= hf_tokenizer= result_queue="
    assert parameters(AgentExecutor.__init__) == names


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (Task, "prompt label task_id images metadata seed env"),
        (SamplingParams, "temperature top_p top_k min_p max_tokens min_tokens stop stop_token_ids seed structural_tag"),
        (Limits, "max_length max_turns step_timeout_s episode_timeout_s generate_timeout_s"),
        (
            Completion,
            "token_ids finish_reason matched_stop logprobs policy_versions policy_version num_cached_tokens answer "
            "forced num_failovers num_request_retries",
        ),
        (StepResult, "observation reward terminated truncated score info sampling images"),
    ],
)
def test_the_core_types_keep_their_fields_in_order(cls, expected):
    assert " ".join(field.name for field in dataclasses.fields(cls)) == expected


def test_the_stop_reasons_keep_their_names():
    assert " ".join(StopReason) == (
        "terminated truncated_by_env max_turns max_length step_timeout episode_timeout aborted error"
    )


def test_the_response_keeps_openrlhfs_keys():
    assert " ".join(ResponseDict.__annotations__) == (
        "prompt label observation_tokens action_ranges rollout_log_probs reward scores truncated extra_logs images "
        "mm_train_inputs"
    )
