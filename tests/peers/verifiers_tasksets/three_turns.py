"""A taskset whose environment asks three times; the reward is the share of answers that repeat the number."""

import verifiers.v1 as vf

__all__ = ["ThreeTurnsEnv", "ThreeTurnsTaskset"]


class ThreeTurnsTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def repeated(self, trace: vf.Trace) -> float:
        said = [message.content or "" for message in trace.assistant_messages]
        return sum(str(number) in text for number, text in enumerate(said)) / 3


class ThreeTurnsEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            for number in range(3):
                segment = await interaction.turn(f"Number {number}?")
                if segment.terminated:
                    break
                if "break" in (segment.last_reply or ""):
                    raise ValueError("the game broke")


class ThreeTurnsTaskset(vf.Taskset[ThreeTurnsTask, vf.TasksetConfig]):
    def load(self):
        return [ThreeTurnsTask(vf.TaskData(idx=0, prompt=None), self.config.task)]
