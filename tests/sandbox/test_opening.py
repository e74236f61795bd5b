"""open_sandbox: every backend by its name, options as they stand in JSON, and what is wrong with them."""

import pytest

from agentenv.errors import ConfigError
from agentenv.sandbox import ExecLimits, Isolation, LocalSandbox, open_sandbox
from agentenv.sandbox.factory import BACKENDS
from agentenv.sandbox.fusion.client import FusionSandbox


def test_the_local_sandbox_is_the_default_and_takes_plain_options():
    sandbox = open_sandbox(min_isolation="namespaces", limits={"cpu_s": 1.0}, preimport=["json"], run_slots=3)
    assert isinstance(sandbox, LocalSandbox)
    assert (sandbox.limits, sandbox.run_slots) == (ExecLimits(cpu_s=1.0), 3)
    assert sandbox._request.min_isolation is Isolation.NAMESPACES


def test_endpoints_make_a_sandbox_elsewhere():
    sandbox = open_sandbox("sandbox_fusion", endpoints=["http://a:1/run_code", "http://b:2"], limits={"cpu_s": 1.0})
    assert isinstance(sandbox, FusionSandbox)
    assert [each.url for each in sandbox.endpoints] == ["http://a:1", "http://b:2"]
    assert sandbox.limits.cpu_s == 1.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_names_its_options(backend):
    with pytest.raises(ConfigError, match=rf"sandbox {backend}: expected options among .* got 'no_such_option'"):
        open_sandbox(backend, no_such_option=1)


@pytest.mark.parametrize(
    ("backend", "options", "text"),
    [
        ("locale", {}, "got 'locale'. Did you mean 'local'"),
        ("sandboxfusion", {}, "Did you mean 'sandbox_fusion'"),
        ("sandbox_fusion", {"endpoint": "http://a:1"}, "Did you mean 'endpoints'"),
        ("sandbox_fusion", {}, "missing a required argument: 'endpoints'"),
        ("sandbox_fusion", {"endpoints": ["a:1"]}, "endpoints: expected addresses"),
        ("local", {"min_isolatoin": "uid"}, "Did you mean 'min_isolation'"),
        ("local", {"min_isolation": "strong"}, "LocalSandbox.min_isolation: expected one of none, uid, "),
        ("local", {"limits": {"cpus": 1}}, "sandbox.limits: expected options among cpu_s"),
        (None, {}, "got None"),
    ],
)
def test_errors_are_reported_with_the_nearest_name(backend, options, text):
    with pytest.raises(ConfigError, match="expected") as error:
        open_sandbox(backend, **options)
    assert text in str(error.value)
