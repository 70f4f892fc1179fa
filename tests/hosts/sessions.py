"""Agents in sessions over the hosts of a service: opened on one host, continued on the next.

    python -m tests.hosts.sessions lost|kept URL...

The output line "continued" means that the last host may be killed. Exits with 0 if each session of the other hosts
continued at once, and the sessions of the lost host behaved as the first argument says. lost: each was answered
with 410 within 30 s, and its id could be used again. kept: each continued within 20 s, including sessions whose ids
the service chose; the last line has one `Kept` per session.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from urllib.parse import urlsplit

import aiohttp
import msgspec

from tests.hosts.cluster import KEY

NUM_SESSIONS = 24
SYSTEM = "Be as brief as this prompt of a session."
LOST_WITHIN_S = 30.0
KEPT_WITHIN_S = 20.0
_HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=3.0)
_SLOW_FACTOR = 2.0  # two busy cores run three hosts


class Kept(msgspec.Struct):
    """A session that continued."""

    path: str
    key: str
    control_key: str
    num_turns: int


class Agent:
    """One session, called on any host."""

    def __init__(self, http: aiohttp.ClientSession, session_id: str | None) -> None:
        """Without an id, the service chooses one."""
        self._http = http
        self.session_id = session_id
        self.messages: list[dict[str, str]] = [{"role": "system", "content": SYSTEM}]
        self.key = self.control_key = self.holder = ""
        self.num_turns = 0

    async def open(self, url: str) -> None:
        """Create the session with an empty history."""
        self.messages = self.messages[:1]
        body = {} if self.session_id is None else {"session_id": self.session_id}
        user = {"authorization": f"Bearer {KEY}"}
        said: dict[str, str] = {}
        while not said:
            async with self._http.post(f"{url}/sessions", json=body, headers=user) as answer:
                if answer.status == 503:  # the processes have not discovered each other yet
                    await asyncio.sleep(0.5)
                    continue
                assert answer.status == 200, await answer.text()
                said = await answer.json()
        self.session_id, self.key, self.control_key = said["session_id"], said["api_key"], said["control_key"]
        self.holder = urlsplit(said["direct_url"]).netloc

    async def say(self, url: str) -> tuple[int, str]:
        """Send one call; returns its status, and the code of its error."""
        self.messages.append({"role": "user", "content": "Go on."})
        body = {"model": "default", "messages": self.messages, "max_tokens": 8}
        path = f"{url}/sessions/{self.session_id}/v1/chat/completions"
        headers = {"authorization": f"Bearer {self.key}"}
        async with self._http.post(path, json=body, headers=headers) as answer:
            said = await answer.json()
        if answer.status == 200:
            self.num_turns += 1
            self.messages.append({"role": "assistant", "content": said["choices"][0]["message"]["content"] or ""})
            return 200, ""
        del self.messages[-1]
        return answer.status, said["error"]["code"]


async def until_lost(agent: Agent, url: str) -> float:
    """Call until the session is reported lost; returns the seconds since the first failed call."""
    began_at = time.monotonic()
    while (said := await agent.say(url)) != (410, "session_lost"):
        assert said[0] in (410, 503), said
        assert time.monotonic() - began_at < _SLOW_FACTOR * LOST_WITHIN_S, said
        await asyncio.sleep(0.5)
    return time.monotonic() - began_at


async def until_kept(agent: Agent, url: str, since: float) -> float:
    """Call until the session continues; returns the seconds since `since`."""
    while (said := await agent.say(url)) != (200, ""):
        assert said[0] == 503, said
        assert time.monotonic() - since < 3 * KEPT_WITHIN_S, said
        await asyncio.sleep(0.5)
    return time.monotonic() - since


async def main(fate: str, *urls: str) -> None:
    lost = urlsplit(urls[-1]).netloc
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60.0)) as http:
        ids = [None if fate == "kept" and number % 2 else f"agent-{number}" for number in range(NUM_SESSIONS)]
        agents = [Agent(http, session_id) for session_id in ids]
        for number, agent in enumerate(agents):
            await agent.open(urls[number % len(urls)])
            said = [await agent.say(urls[(number + step) % len(urls)]) for step in range(2 * len(urls))]
            assert said == [(200, "")] * len(said), said
        holders = [agent.holder for agent in agents]
        assert set(holders) == {urlsplit(url).netloc for url in urls}, holders
        print("continued", flush=True)
        while True:
            try:
                there_at = time.monotonic()
                async with http.get(f"{urls[-1]}/health", timeout=_HEALTH_TIMEOUT):
                    await asyncio.sleep(0.1)
            except (aiohttp.ClientError, TimeoutError):
                break
        with_it = [agent for agent in agents if agent.holder == lost]
        kept_ones = with_it if fate == "kept" else []
        keeping = [asyncio.create_task(until_kept(agent, urls[0], there_at)) for agent in kept_ones]
        others = [agent for agent in agents if agent.holder != lost]
        began_at = time.monotonic()
        said, times = [], [began_at]
        for agent, url in itertools.product(others, urls[:-1]):
            said.append(await agent.say(url))
            times.append(time.monotonic())
        assert said == [(200, "")] * len(said), said
        slowest_s = max(later - earlier for earlier, later in itertools.pairwise(times))
        print(f"{len(said)} calls of other hosts' sessions in {times[-1] - began_at:.1f} s, one {slowest_s:.1f} s")
        if fate == "kept":
            times = [await one for one in keeping]
            print(f"{len(with_it)} sessions of the lost host went on after {max(times):.1f} s at most")
            for agent in agents:
                assert await agent.say(urls[1]) == (200, "")
            kept = [Kept(f"/sessions/{one.session_id}", one.key, one.control_key, one.num_turns) for one in agents]
            print(msgspec.json.encode(kept).decode())
            return
        times = await asyncio.gather(*(until_lost(agent, urls[0]) for agent in with_it))
        print(f"{len(with_it)} sessions of the lost host named lost after {max(times):.1f} s at most")
        for agent in with_it:
            await agent.open(urls[1])
            assert await agent.say(urls[0]) == (200, "")
        print(f"their ids are of use again, held by {sorted({agent.holder for agent in with_it})}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
