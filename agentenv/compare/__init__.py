"""Compare two runs: paired over tasks, one interval that decides, and everything that is not comparable."""

from typing import TYPE_CHECKING

from agentenv._util.lazy import lazy_names

if TYPE_CHECKING:
    from agentenv.compare.comparison import RunComparison, compare

__all__ = ["RunComparison", "compare"]
__getattr__ = lazy_names(__name__)
