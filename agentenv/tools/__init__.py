"""Tools for environments: functions of Python, servers of the Model Context Protocol, and a Python interpreter."""

from typing import TYPE_CHECKING

from agentenv._util.lazy import lazy_names

if TYPE_CHECKING:
    from agentenv.tools.calling import ParsedAction as ParsedAction
    from agentenv.tools.calling import ToolError as ToolError
    from agentenv.tools.calling import answer_calls as answer_calls
    from agentenv.tools.python import PythonTool as PythonTool
    from agentenv.tools.schemas import schema_of as schema_of
    from agentenv.tools.toolset import Toolset as Toolset

__getattr__ = lazy_names(__name__)
