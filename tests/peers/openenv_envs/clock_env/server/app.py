"""A clock that is set and read by tools."""

from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State


class Clock(MCPEnvironment):
    """Reading the clock at noon ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        self.hour = 0
        server = FastMCP("clock")

        @server.tool
        def turn(hours: int) -> str:
            """Turn the clock."""
            self.hour = (self.hour + hours) % 24
            return f"It is {self.hour} o'clock."

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.hour = 0
        return Observation(metadata={"message": "Turn the clock to noon."})

    async def step_async(self, action, timeout_s=None, **kwargs):
        observation = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        if isinstance(action, CallToolAction):
            observation.reward, observation.done = float(self.hour == 12), self.hour == 12
        return observation

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation()

    @property
    def state(self):
        return State()


app = create_app(Clock, CallToolAction, CallToolObservation, max_concurrent_envs=8)
