"""SkyRL 0.3.0's server of tinker's interface, with JAX on the CPU. Usage: skyrl_server.py api|engine FLAGS

SkyRL starts its engine by `uv run`, which installs packages; here this Python starts it, with the packages on its path.
"""

import json
import os
import runpy
import signal
import sys
import threading
import typing
from importlib import import_module

import typing_extensions
import uvicorn

typing.TypedDict = typing_extensions.TypedDict  # pydantic refuses the other one in Python 3.11
api = import_module("skyrl.tinker.api")


def end_with_the_pipe():
    """End this process's group at the end of its input: when the process that started it has ended, however."""
    sys.stdin.read()
    os.killpg(0, signal.SIGTERM)


def engine_command(parent, config):
    return [sys.executable, __file__, "engine", *api.config_to_argv(config)]


which = sys.argv.pop(1)
if which == "engine":
    runpy.run_module("skyrl.tinker.engine", run_name="__main__")
else:
    threading.Thread(target=end_with_the_pipe, daemon=True).start()
    flags = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    port, backend = int(flags.pop("--port")), json.loads(flags.pop("--backend_config"))
    api._build_uv_run_cmd_engine = engine_command
    config = {key.removeprefix("--"): value for key, value in flags.items()}
    api.app.state.engine_config = api.EngineConfig(**config, backend_config=backend)
    uvicorn.run(api.app, host="127.0.0.1", port=port, log_level="warning")
