"""Tools for environments: functions of Python, servers of the Model Context Protocol, and a Python interpreter."""

from typing import TYPE_CHECKING

from agentenv._util.lazy import lazy_names

if TYPE_CHECKING:
    from agentenv.tools.calling import ParsedAction, ToolError, answer_calls
    from agentenv.tools.python import PythonTool
    from agentenv.tools.schemas import schema_of
    from agentenv.tools.toolset import Toolset

__all__ = ["ParsedAction", "PythonTool", "ToolError", "Toolset", "answer_calls", "schema_of"]
__getattr__ = lazy_names(__name__)
