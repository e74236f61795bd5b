"""A taskset whose environment has two agents."""

import verifiers.v1 as vf

__all__ = ["TwoSeatsEnv", "TwoSeatsTaskset"]


class TwoSeatsConfig(vf.EnvConfig):
    left: vf.AgentConfig = vf.AgentConfig()
    right: vf.AgentConfig = vf.AgentConfig()


class TwoSeatsEnv(vf.Env[TwoSeatsConfig]):
    async def run(self, task, agents):
        await agents.left.run(task)


class TwoSeatsTaskset(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        return [vf.Task(vf.TaskData(idx=0, prompt="?"))]
