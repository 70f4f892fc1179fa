"""Dashboard, alerts and the table of metrics: all named metrics are exported, and Prometheus accepts the files.

`python -m tests.servers.test_monitoring` rewrites the table in `docs/guides/observability.md`.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
import yaml

from agentloop.client.client import RolloutClient
from agentloop.errors import NotFound
from agentloop.observability.metrics import FAMILIES, PREFIX, Kind
from agentloop.rollout.context import LoopContext
from agentloop.types import Message, RolloutTask, ToolCall
from agentloop_servers import metrics
from agentloop_servers.coordinator import coordinator
from agentloop_servers.http.auth import Keys, key_digest
from agentloop_servers.net.tcp import listening_socket
from tests.support.service.whole_service import simulated_config, whole_site

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "servers" / "monitoring"
PAGE = ROOT / "docs" / "guides" / "observability.md"
BEGIN, END = "<!-- metrics: python -m tests.servers.test_monitoring -->\n", "<!-- end -->"

RULES: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for rule in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
}
PANELS: list[dict[str, Any]] = json.loads((MONITORING / "grafana.json").read_text())["panels"]

promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (apt: prometheus)")


class Query(NamedTuple):
    """A query of a panel or an alert, and the labels that its legend or text names."""

    where: str
    expr: str
    shown: frozenset[str]


QUERIES = [
    *(
        Query(panel["title"], one["expr"], frozenset(re.findall(r"{{(\w+)}}", one.get("legendFormat", ""))))
        for panel in PANELS
        for one in panel.get("targets", ())
    ),
    *(
        Query(name, rule["expr"], frozenset(re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))))
        for name, rule in RULES.items()
    ),
]

_WORDS = {"and", "or", "unless", "on", "ignoring", "by", "group_left", "offset"}
_OWN_LABELS = {"up": {"job", "instance"}}  # Prometheus' own


def selectors(expr: str) -> Iterator[tuple[str, str]]:
    """Yield the metrics of a query, each with the contents of its braces; functions and keywords are skipped."""
    without_labels = re.sub(r"\b(by|on|ignoring) \([^)]*\)", "", expr)
    bare = re.sub(r'"[^"]*"|\[[^]]*\]', lambda found: found[0] if found[0][0] == '"' else "", without_labels)
    for found in re.finditer(r'(?<![\w"~=.])([a-z_]\w*)(?!\w|\s*\()(?:{([^}]*)})?', bare):
        if found[1] not in _WORDS and not _is_within_braces(bare, found.start()):
            yield found[1], found[2] or ""


def _is_within_braces(text: str, at: int) -> bool:
    return text.rfind("{", 0, at) > text.rfind("}", 0, at)


def labels_of(metric: str) -> set[str]:
    """Return the labels of a metric. Raises KeyError for a metric that the service does not export."""
    if metric in _OWN_LABELS:
        return _OWN_LABELS[metric]
    name = metric.removeprefix(PREFIX) if metric.startswith(PREFIX) else ""
    part = re.fullmatch(r"(\w+)_(bucket|sum|count)", name)
    if part is not None and part[1] in FAMILIES and FAMILIES[part[1]].kind is Kind.HISTOGRAM:
        return {*FAMILIES[part[1]].labels, *(["le"] if part[2] == "bucket" else [])}
    if FAMILIES[name].kind is Kind.HISTOGRAM:
        raise KeyError(metric)
    return set(FAMILIES[name].labels)


def problems_of(query: Query) -> list[str]:
    """Return the names in a query that the service does not export."""
    found, known = [], set[str]()
    for metric, matchers in selectors(query.expr):
        try:
            labels = labels_of(metric)
        except KeyError:
            found.append(metric)
            continue
        known |= labels
        found += [f"{metric}{{{name}}}" for name in re.findall(r"(\w+)\s*[=!]~?", matchers) if name not in labels]
    named = re.findall(r"\b(?:by|on|ignoring) \(([^)]*)\)", query.expr)
    grouped = {name.strip() for names in named for name in names.split(",") if name.strip()}
    return [*found, *sorted((grouped | query.shown) - known)]


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.where)
def test_a_query_names_what_the_service_counts(query: Query) -> None:
    assert list(selectors(query.expr))
    assert problems_of(query) == []


def test_a_query_of_anything_else_is_found() -> None:
    wrong = {
        "sum by (worker) (rate(agentloop_no_such_total[5m]))": ["agentloop_no_such_total", "worker"],
        'agentloop_samples{phase="running"} > 0': ["agentloop_samples{phase}"],
        "rate(agentloop_queue_wait_seconds[5m])": ["agentloop_queue_wait_seconds"],
        "agentloop_samples_count": ["agentloop_samples_count"],
        'vllm_running{replica="a"} or vector(0)': ["vllm_running"],
    }
    for expr, named in wrong.items():
        assert problems_of(Query("", expr, frozenset())) == named
    assert problems_of(Query("", "agentloop_workers", frozenset({"replica"}))) == ["replica"]


def test_the_dashboard_shows_every_family_through_one_data_source() -> None:
    shown = {metric for query in QUERIES for metric, _ in selectors(query.expr)}
    parts = ("", "_bucket", "_sum", "_count")
    assert [name for name in FAMILIES if not any(f"{PREFIX}{name}{part}" in shown for part in parts)] == []
    assert {panel["type"] for panel in PANELS} == {"row", "stat", "timeseries"}
    sources = [panel["datasource"] for panel in PANELS if panel["type"] != "row"]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)


def test_each_alert_names_a_command_and_stands_on_the_page() -> None:
    page = PAGE.read_text()
    for name, rule in RULES.items():
        assert re.search(r"agentloop (why|status|weights push)", rule["annotations"]["do"]), name
        assert f"| `{name}` |" in page


# The documentation page


def table() -> str:
    rows = [
        f"| `{one.name}` | {one.kind} | {', '.join(f'`{label}`' for label in one.labels)} | {one.about} |"
        for one in FAMILIES.values()
    ]
    return "\n".join(["| metric | kind | labels | what it is |", "|---|---|---|---|", *rows, ""])


def test_the_page_has_all_metrics_and_few_words() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    block, _, after = rest.partition(END)
    assert block == table(), "python -m tests.servers.test_monitoring"
    words = re.sub(r"```.*?```", "", before + after, flags=re.DOTALL).split()  # pictures and commands are not words
    assert len(words) < 1500


# Promtool


def monitoring_in(where: Path, target: str = "localhost:8000", key: str = "m-1") -> Path:
    """Copy the files that Prometheus reads, with a key. Returns its config."""
    for name in ("prometheus.yml", "alerts.yml"):
        shutil.copy(MONITORING / name, where)
    (where / "metrics.key").write_text(key)
    config = where / "prometheus.yml"
    config.write_text(config.read_text().replace("localhost:8000", target))
    return config


def checked(*command: str | Path, stdin: bytes = b"") -> None:
    done = subprocess.run(["promtool", *command], input=stdin, capture_output=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


@promtool
def test_prometheus_takes_config_and_rules(tmp_path: Path) -> None:
    checked("check", "config", "--lint=all", "--lint-fatal", monitoring_in(tmp_path))


STEADY = {
    'agentloop_samples{state="running"}': "9+0x60",
    'agentloop_trajectories_total{stop_reason="completed",failure="",source="rollout"}': "5+1x60",
    'agentloop_replica_kv_hit_ratio{replica="a"}': "0.9+0x60",
    "agentloop_disk_free_bytes": "1e12+0x60",
    'agentloop_process_up{process="worker-1"}': "1+0x60",
    'agentloop_log_events_total{event="old",level="error"}': "3+0x60",
    "agentloop_logprob_problems_total": "2+0x60",
    'agentloop_log_events_total{event="new",level="warning"}': "_x30 1+1x30",
    'up{job="agentloop",instance="a"}': "1+0x60",
}
"""One value a minute of a service that does well; an error was long ago."""

STUCK = {'agentloop_trajectories_total{stop_reason="completed",failure="",source="rollout"}': "5+0x60"}
FAULTS: dict[str, tuple[dict[str, str], str]] = {
    "no replica": ({'agentloop_not_begun{reason="no_replica"}': "1+0x60"}, "NoReplica"),
    "asleep": (
        {'agentloop_not_begun{reason="no_replica"}': "1+0x60", 'agentloop_not_begun{reason="asleep"}': "1+0x60"},
        "",
    ),
    "nothing ends": (STUCK, "NothingEnds"),
    "nothing has ever ended": (dict.fromkeys(STUCK, "_x60"), "NothingEnds"),
    "nothing ends in a pause": (STUCK | {'agentloop_not_begun{reason="paused"}': "1+0x60"}, ""),
    "nothing runs": (STUCK | {'agentloop_samples{state="running"}': "0+0x60"}, ""),
    "the first ends": (dict.fromkeys(STUCK, "_x47 1+0x12"), ""),
    "the first ends after long": (dict.fromkeys(STUCK, "_x54 1+0x5"), ""),
    "an update": ({"agentloop_weight_update_age_seconds": "0+60x30"}, ""),
    "an update that hangs": ({"agentloop_weight_update_age_seconds": "0+60x60"}, "UpdateOverdue"),
    "thrash": ({'agentloop_replica_kv_hit_ratio{replica="a"}': "0.2+0x60"}, "KvThrash"),
    "disk": ({"agentloop_disk_free_bytes": "3e8+0x60"}, "DiskFills"),
    "stale": ({'agentloop_not_begun{reason="stale"}': "1+0x60"}, "HeldByStaleness"),
    "a silent worker": ({'agentloop_process_up{process="worker-1"}': "1+0x50 0+0x10"}, "ProcessSilent"),
    "a first error": ({'agentloop_log_events_total{event="new",level="error"}': "_x52 1+0x8"}, "Errors"),
    "another error": ({'agentloop_log_events_total{event="old",level="error"}': "3+0x51 4+0x8"}, "Errors"),
    "a first logprob problem": ({"agentloop_logprob_problems_total": "_x52 1+0x8"}, "LogprobProblems"),
    "another logprob problem": ({"agentloop_logprob_problems_total": "2+0x51 3+0x8"}, "LogprobProblems"),
    "the service was away": (
        {'agentloop_log_events_total{event="old",level="error"}': "3+0x40 stale _x7 3+0x12"},
        "",
    ),
    "no answer": ({'up{job="agentloop",instance="a"}': "1+0x50 0+0x10"}, "NotScraped"),
    "all is well": ({}, ""),
}


@promtool
@pytest.mark.parametrize("fault", FAULTS)
def test_an_alert_fires_for_its_fault_alone(fault: str, tmp_path: Path) -> None:
    monitoring_in(tmp_path)
    changed, fires = FAULTS[fault]
    series = [{"series": name, "values": values} for name, values in (STEADY | changed).items()]
    alerts = {
        "interval": "1m",
        "name": fault,
        "input_series": series,
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": "58m",
                "exp_samples": [{"labels": f'{{alertname="Agentloop{fires}"}}', "value": 1}] if fires else [],
            }
        ],
    }
    test = {"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": [alerts]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
    checked("test", "rules", tmp_path / "test.yml")


# A Prometheus, a service, and a minute of work

ABSENT_THERE = {
    "agentloop_tools_running": "the calculator answers at once",
    "agentloop_user_calls_waiting": "the service has no users",
    "agentloop_asleep": "the service does not sleep",
    "agentloop_weight_update_age_seconds": "an update of simulated engines is over at once",
    'agentloop_not_begun{reason="no_replica"}': "there is a replica",
    'agentloop_not_begun{reason=~"asleep|paused"}': "the pause is over at the end",
    'agentloop_not_begun{reason="stale"}': "no limit holds what waits",
    "agentloop_not_begun": "nothing is in its way at the end",
    "agentloop_logprob_problems_total": "simulated engines have none",
    "sum by (event, level) (agentloop_log_events_total)": "parts of one process share its log: none counts it",
    'agentloop_log_events_total{level=~"error|critical"}': "the same",
}
"""Queries of panels, and selectors of alerts, that have no values in such a run, each with the reason."""


class Works:
    """A loop that samples a turn, calls a tool, and samples a turn that does not extend the first one."""

    async def run(self, rollout_task: RolloutTask, ctx: LoopContext) -> None:
        await ctx.sample(max_tokens=16)
        await ctx.run_tools([ToolCall("c", "calculator", {"expression": "2 + 3"})])
        await ctx.sample(max_tokens=16)


class Waits:
    """A loop that waits outside the engine."""

    async def run(self, rollout_task: RolloutTask, ctx: LoopContext) -> None:
        await asyncio.sleep(60)


async def work(url: str, seconds: float) -> asyncio.StreamWriter:
    """Put load on a service. Returns a request that has no answer yet.

    The load consists of rollouts, sessions, weight updates, pauses, rewards and failing requests.
    """
    tasks = [
        RolloutTask("t", (Message("user", "Hi"),), ("calculator",), loop=f"{__name__}:Works", reward=reward)
        for reward in ("exact_match", f"{__name__}:fails")
    ]
    until, version = asyncio.get_running_loop().time() + seconds, 0
    async with RolloutClient(url, admin_key="admin-1") as client:
        while asyncio.get_running_loop().time() < until:
            version += 1
            rollout = await client.submit(tasks, num_samples=8)
            async with client.session() as session:
                for text, num_retries in (("Hi", 0), ("Go on", 0), ("Hi", 1)):  # a second conversation, and a retry
                    await session.openai.chat.completions.create(
                        model="default",
                        messages=[{"role": "user", "content": text}],
                        max_tokens=8,
                        extra_headers={"x-stainless-retry-count": str(num_retries)},
                    )
                left = await session.openai.chat.completions.create(
                    model="default", messages=[{"role": "user", "content": "Hi"}], max_tokens=1000, stream=True
                )
                await left.close()
            await client.update_weights(ROOT / "examples" / "tiny_policy" / "v1", version=version)
            await client.pause()
            await asyncio.sleep(1)
            await client.resume()
            with pytest.raises(NotFound):
                await client.rollout_status("none")
            await asyncio.sleep(1)
            assert (await client.rollout_status(rollout.rollout_ids[0])).num_finished
        await client.submit([replace(tasks[0], loop=f"{__name__}:Waits")])
        slow = await slow_request(url, "user-1")
        await asyncio.sleep(3)
        return slow


async def slow_request(url: str, key: str = "") -> asyncio.StreamWriter:
    """Send a request's headers without its body."""
    host, _, port = url.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    headers = f"Host: {host}\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\nContent-Length: 9"
    writer.write(f"POST /rollouts HTTP/1.1\r\n{headers}\r\n\r\n".encode())
    return writer


def fails(task: RolloutTask, messages: tuple[Message, ...]) -> float:
    """A reward function that raises."""
    raise ValueError("fails")


@asynccontextmanager
async def prometheus(config: Path) -> AsyncIterator[Callable[[str], Awaitable[list[Any]]]]:
    """Start a Prometheus. Yields a function that returns the series of a query."""
    with listening_socket("127.0.0.1") as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    paths = f"--config.file={config}", f"--storage.tsdb.path={config.parent / 'tsdb'}"
    with (config.parent / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            "prometheus", *paths, f"--web.listen-address={address}", stdout=log, stderr=log
        )
    async with aiohttp.ClientSession(f"http://{address}") as http:

        async def values(expr: str) -> list[Any]:
            async with http.get("/api/v1/query", params={"query": expr}) as answer:
                body = await answer.json()
            assert body["status"] == "success", (expr, body)
            found: list[Any] = body["data"]["result"]
            return found

        try:
            yield values
        finally:
            process.terminate()
            await process.wait()


@pytest.mark.long
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus (apt: prometheus)")
async def test_every_query_has_values_at_a_real_prometheus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (metrics, coordinator):
        monkeypatch.setattr(module, "REPORT_S", 0.5)
    keys = Keys.of(["user-1"], "admin-1")
    keys.metrics_digest = key_digest("m-1")
    (tmp_path / "run").mkdir()
    service = simulated_config(workers={"allowed_imports": [__name__]})
    async with whole_site(service, tmp_path / "run", reports=True, keys=keys) as site:
        config = monitoring_in(tmp_path, site.urls[0].removeprefix("http://"))
        config.write_text(config.read_text().replace("15s", "1s"))
        async with prometheus(config) as values:
            slow = await work(site.urls[0], 60.0)
            bearer, url = {"authorization": "Bearer m-1"}, f"{site.urls[0]}/metrics"
            async with aiohttp.ClientSession() as http, http.get(url, headers=bearer) as answer:
                checked("check", "metrics", stdin=await answer.read())
            empty = set[str]()
            for query in QUERIES:
                found = await values(query.expr.replace("$__rate_interval", "30s"))
                if query.where in RULES:  # it has values only during a fault, but its selectors have values earlier
                    assert found == [], query
                    parts = [f"{name}{{{said}}}" if said else name for name, said in selectors(query.expr)]
                else:
                    parts = [query.expr]
                for part in parts:
                    found = await values(part.replace("$__rate_interval", "30s"))
                    if not found or all(one["value"][1] == "NaN" for one in found):
                        empty.add(part)
            slow.close()
    assert empty == set(ABSENT_THERE)


if __name__ == "__main__":
    head, _, tail = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(head + BEGIN + table() + END + tail.partition(END)[2])
