"""Solver and verifier: one agent answers, another one checks the answer, and both are trained.

    RolloutTask("t", (Message("user", "2 + 3?"),), reference="5", loop="examples.21_solver_verifier:Checked")

The solver is rewarded for a right answer, and the verifier for a right verdict. If the verifier rejects the first
answer, the solver may correct it once.
"""

from agentloop.rollout import LoopContext
from agentloop.rollout.rewards import exact_match
from agentloop.types import Message, RolloutTask

INSTRUCTIONS = Message(
    "system", 'You check answers. Answer with "correct" or "wrong", and name the mistake of a wrong answer.'
)


class Checked:
    """One question. One object serves all trajectories: state is in local variables."""

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        solver = ctx.agent("solver", *task.messages)
        solver.set_reward(0.0)  # unless it answers: a limit of the task may end the trajectory before
        ctx.set_reward(0.0)
        question = task.messages[-1].content
        verdicts = []
        for attempt in (1, 2):
            while (turn := await solver.sample()).calls:
                await solver.run_tools(turn.calls)
            is_right = exact_match(task, solver.messages) == 1.0
            request = Message("user", f"Question: {question}\nAnswer: {turn.content}")
            verifier = ctx.agent(f"verifier-{attempt}", INSTRUCTIONS, request, has_tools=False)
            verdict = (await verifier.sample()).content
            is_accepted = verdict.strip().lower().startswith("correct")
            verifier.set_reward(1.0 if is_accepted == is_right else 0.0)
            verdicts.append(is_accepted == is_right)
            if is_accepted or attempt == 2:
                break
            solver.observe(Message("user", f"A reviewer found a mistake: {verdict}"))
        solver.set_reward(float(is_right))
        ctx.set_reward(float(is_right))
        ctx.set_metrics(verdict_accuracy=sum(verdicts) / len(verdicts))
