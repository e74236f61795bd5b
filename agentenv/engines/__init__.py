"""Engines sample tokens: `open_engine` opens any of them; `scripted` is for tests, `hf` and `vllm` run models.

`chat` is for API models, which return text only.
"""

from typing import TYPE_CHECKING

from agentenv._util.lazy import lazy_names

if TYPE_CHECKING:
    from agentenv.engines.models import resolve_model as resolve_model
    from agentenv.engines.opening import open_engine as open_engine

__getattr__ = lazy_names(__name__)
