"""A taskset of one turn: the word in capitals, in a tag; half of the reward for the tag."""

import verifiers.v1 as vf

__all__ = ["ShoutTaskset"]


class ShoutData(vf.TaskData):
    word: str


class ShoutTask(vf.Task[ShoutData]):
    @vf.reward(weight=0.5)
    async def tagged(self, trace: vf.Trace) -> float:
        return float("<out>" in (trace.last_reply or ""))

    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        return float(f"<out>{self.data.word.upper()}</out>" in (trace.last_reply or ""))

    @vf.metric
    async def num_chars(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class ShoutConfig(vf.TasksetConfig):
    words: tuple[str, ...] = ("stone", "river", "cloud")


class ShoutTaskset(vf.Taskset[ShoutTask, ShoutConfig]):
    def load(self):
        for idx, word in enumerate(self.config.words):
            data = ShoutData(idx=idx, system_prompt="Answer in <out>.", prompt=f"Say {word}.", word=word)
            yield ShoutTask(data, self.config.task)
