"""A taskset whose reward runs what the model wrote."""

import verifiers.v1 as vf

__all__ = ["RunsCommandsTaskset"]


class RunsCommandsTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def passed(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        done = await runtime.run(["sh", "-c", trace.last_reply or ""], {})
        return float(done.exit_code == 0)


class RunsCommandsTaskset(vf.Taskset[RunsCommandsTask, vf.TasksetConfig]):
    def load(self):
        return [RunsCommandsTask(vf.TaskData(idx=0, prompt="?"), self.config.task)]
