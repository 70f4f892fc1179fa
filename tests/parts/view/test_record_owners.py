"""The viewer's routes in a service with users: each user sees their own records and annotations, the admin all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from agentloop.api.facts import FactsQuery
from agentloop.client.client import RolloutClient
from agentloop.errors import InvalidRequest, NotFound
from agentloop.storage import facts
from agentloop.storage.trajectory_store import STORE_NAME
from agentloop.types import Message, RolloutTask, Trajectory
from agentloop_servers import metrics
from agentloop_servers.coordinator import coordinator
from agentloop_servers.ingress.records import TokenLabels
from agentloop_view.app import viewer_app
from agentloop_view.stored_run import StoredRun
from tests.parts.view.test_records import get
from tests.servers.test_users import ROOT, digest, write
from tests.support.endpoint.front_door import serving
from tests.support.service.whole_service import simulated_config, whole_site


@dataclass
class Owners:
    url: str
    run_dir: Path
    records: dict[str, list[Trajectory]]  # by user

    def client(self, user: str) -> RolloutClient:
        return RolloutClient(self.url, api_key=user)

    async def ask(self, user: str, path: str) -> tuple[int, Any]:
        status, body, _ = await get(self.url + path, authorization=f"Bearer {user}")
        return status, orjson.loads(body)


@pytest.fixture(params=[4096, 3], ids=["fresh", "rolled up"])
async def owners(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Owners]:
    """Rollouts of one name by alice (six samples) and by bob (two)."""
    monkeypatch.setattr(facts, "MAX_FRESH", request.param)
    for module in (metrics, coordinator):
        monkeypatch.setattr(module, "REPORT_S", 0.1)
    (tmp_path / "run").mkdir()
    named = ({"name": name, "keys": [digest(name)]} for name in ("alice", "bob"))
    path = write(tmp_path / "users.yaml", *named, ROOT)
    async with whole_site(simulated_config(users=str(path)), tmp_path / "run", reports=True) as site:
        made = Owners(site.urls[0], tmp_path / "run", {})
        for user, num_samples in (("alice", 6), ("bob", 2)):
            async with made.client(user) as client:
                rollout = await client.submit([RolloutTask("t", (Message("user", "Hi"),))], num_samples=num_samples)
                made.records[user] = [record async for record in rollout]
        yield made


async def test_each_lists_and_opens_its_own_and_the_admin_all(owners: Owners) -> None:
    seen = {user: (await owners.ask(user, "/trajectories"))[1] for user in ("alice", "bob", "root")}
    numbers = {"alice": 6, "bob": 2, "root": 8}
    for user, page in seen.items():
        assert len(page["records"]) == numbers[user]
        assert sum(total["num_records"] for total in page["totals"]) == numbers[user]
        tokens = sum(one["num_sampled_tokens"] for one in page["records"])
        assert sum(total["num_sampled_tokens"] for total in page["totals"]) == tokens
        assert sum(page["histograms"]["total_s"]["counts"]) == numbers[user]
        notable = (await owners.ask(user, "/trajectories/notable"))[1]
        assert {one["record"]["seq"] for one in notable} <= {one["seq"] for one in page["records"]}
        assert len(notable) > 0
    assert {one["seq"] for user in ("alice", "bob") for one in seen[user]["records"]} == {
        one["seq"] for one in seen["root"]["records"]
    }
    for seq, found in ((1 << 62, 404), (1 << 63, 400), (-(1 << 63) - 1, 400), (10**40, 400)):
        assert (await owners.ask("root", f"/trajectories/{seq}"))[0] == found
    assert (await owners.ask("root", f"/trajectories?cursor=[{10**40},1]"))[0] == 400
    for user, other in (("alice", "bob"), ("bob", "alice")):
        own = {one["rollout_id"] for one in seen[user]["records"]}
        assert own == {record.rollout_id for record in owners.records[user]}
        for one in seen[user]["records"]:
            status, page = await owners.ask(user, f"/trajectories/{one['seq']}")
            assert (status, page["record"]["rollout_id"]) == (200, one["rollout_id"])
            status, refused = await owners.ask(other, f"/trajectories/{one['seq']}")
            _, unknown = await owners.ask(other, "/trajectories/99999")
            message = unknown["error"]["message"].replace("99999", str(one["seq"]))
            assert (status, refused) == (404, {"error": {**unknown["error"], "message": message}})
            whole = (await owners.ask("root", f"/trajectories/{one['seq']}"))[1]["record"]["rollout_id"]
            assert whole == f"{user}~{one['rollout_id']}"
        group = f"{one['rollout_id']}/{one['group_id']}"
        for asking, asked, number in (
            (user, group, numbers[user]),
            ("root", f"{user}~{group}", numbers[user]),
            (other, group, 0),
            (other, f"{user}~{group}", 0),
        ):
            assert len((await owners.ask(asking, f"/trajectories?group={asked}"))[1]["records"]) == number
    async with owners.client("bob") as client:
        assert len((await client.list_records(FactsQuery())).records) == 2


async def test_what_tells_of_all_users_is_the_admins(owners: Owners) -> None:
    for path in ("/flight", "/history", "/why", "/phases"):
        assert [(await owners.ask(user, path))[0] for user in ("alice", "root")] == [403, 200]
    for path in ("/updates", "/status"):
        assert [(await owners.ask(user, path))[0] for user in ("alice", "root")] == [200, 200]


async def test_a_trainers_numbers_are_beside_its_records(owners: Owners) -> None:
    records = owners.records["alice"]
    tokens = [np.linspace(-1, 1, len(record.path.response_ids)) for record in records]
    async with owners.client("alice") as client, owners.client("bob") as other:
        await client.annotate_all("advantage", zip(records, ([one] for one in tokens), strict=True))
        for value in (0.25, 0.5):
            await client.annotate(records[0], "return", value)
        with pytest.raises(InvalidRequest, match="responses of"):
            await client.annotate(records[0], "advantage", [tokens[0][1:]])
        with pytest.raises(NotFound):
            await other.annotate(records[0], "return", 9.0)
    listed = (await owners.ask("alice", "/trajectories"))[1]["records"]
    stored = StoredRun(owners.run_dir / STORE_NAME)
    async with serving(viewer_app(stored, TokenLabels(None))) as offline, asyncio.timeout(30):
        while (spent := await owners.ask("root", "/phases"))[1]["decode"] == 0:
            await asyncio.sleep(0.1)
        assert set(spent[1]) == {"queue", "place", "prefill", "decode", "tools", "reward", "unavailable"}
        assert orjson.loads((await get(f"{offline}/phases"))[1]).keys() == spent[1].keys()
        for one in listed:
            place = next(at for at, record in enumerate(records) if record.sample_index == one["sample_index"])
            shown = (await owners.ask("alice", f"/trajectories/{one['seq']}"))[1]["annotations"]
            values = [tokens[place].astype(np.float32).tolist()]
            wanted = {"advantage": {"scope": "token", "values": values}}
            if place == 0:
                wanted["return"] = {"scope": "record", "values": [[0.5]]}
            assert shown == wanted
            assert orjson.loads((await get(f"{offline}/trajectories/{one['seq']}"))[1])["annotations"] == wanted
    stored.close()
