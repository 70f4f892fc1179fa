"""Self-play: the policy plays both sides of Nim, and each player has its own conversation and reward.

    RolloutTask("nim-7", (Message("user", "7"),), loop="examples.20_self_play:Nim", limits=Limits(max_turns=40))

The task's message has the number of stones. The players take one to three stones in turn, and the player that takes
the last one wins. `agentloop_trainers.group_rows` compares the first players of a group with each other, and
likewise the second players.
"""

import re

from agentloop.rollout import LoopContext
from agentloop.types import Message, RolloutTask

RULES = (
    'You play Nim. In your turn you take 1, 2 or 3 stones. Whoever takes the last stone wins. Answer with "take N".'
)


class Nim:
    """One game. One object serves all trajectories: state is in local variables."""

    async def run(self, task: RolloutTask, ctx: LoopContext) -> None:
        num_stones = int(task.messages[-1].content)
        system = Message("system", RULES)
        names = ("first", "second")
        players: dict[str, LoopContext] = {}
        move, num_moves, winner = "", 0, ""
        while not winner:
            name, other = names[num_moves % 2], names[1 - num_moves % 2]
            state = Message("user", f"{move}There are {num_stones} stones.")
            if name in players:
                players[name].observe(state)
            else:
                players[name] = ctx.agent(name, system, state, has_tools=False)
            players[name].set_reward(-1.0)  # unless it wins: a limit of the task may end the game here
            reply = await players[name].sample()
            taken = re.search(r"take ([1-3])\b", reply.content)
            if taken is None or int(taken[1]) > num_stones:
                winner = other  # an illegal move loses
                break
            num_stones -= int(taken[1])
            move = f"The other player took {taken[1]}. "
            num_moves += 1
            if num_stones == 0:
                winner = name
        for name, player in players.items():
            player.set_reward(1.0 if name == winner else -1.0)
        ctx.set_metrics(num_moves=num_moves)
