"""Compare two runs: paired over tasks, one interval that decides, and everything that is not comparable."""

from typing import TYPE_CHECKING

from agentenv._util.lazy import lazy_names

if TYPE_CHECKING:
    from agentenv.compare.comparison import RunComparison as RunComparison
    from agentenv.compare.comparison import compare as compare

__getattr__ = lazy_names(__name__)
