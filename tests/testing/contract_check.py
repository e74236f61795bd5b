"""`check`: what `agentenv check --quick` finds wrong with an environment, as a call."""

from agentenv.core.arguments import parse_json_object
from agentenv.testing.conformance.cases import task_from_flags
from agentenv.testing.conformance.context import ConformanceOptions
from agentenv.testing.conformance.suite import make_context, run_suite


def check(target, *, env_kwargs="{}", prompt="", label=None, step_timeout_s=30.0, notify=lambda line: None):
    """Return the problems of the property `contract`."""
    arguments, task = parse_json_object("--env_kwargs", env_kwargs), task_from_flags(prompt, label)
    context = make_context(ConformanceOptions(target, arguments, task, step_timeout_s=step_timeout_s), notify)
    (outcome,) = run_suite(context, only=("contract",))
    return list(outcome.problems)
