"""A taskset for the test of the bridge to verifiers: one turn, and a reward that depends on the policy's answer."""

import verifiers.v1 as vf

__all__ = ["CountingTaskset"]


class CountingTask(vf.Task):
    """Score an answer by its length; lengths, and therefore rewards, differ from sample to sample."""

    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        return 1.0 + len(trace.last_reply or "")


class CountingTaskset(vf.Taskset):
    """Three questions."""

    def load(self) -> list[CountingTask]:
        return [CountingTask(vf.TaskData(prompt=f"Count to {n}."), self.config.task) for n in (3, 4, 5)]
