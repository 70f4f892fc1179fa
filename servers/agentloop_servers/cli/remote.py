"""Commands for a running service."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Column, Table

from agentloop.api.coordinator import ServiceStatus, UpdateReport
from agentloop.api.findings import waiting_calls
from agentloop.client.client import RolloutClient
from agentloop.client.publish import PublishReport
from agentloop.engine.interface import MemoryTag
from agentloop.types import KVPolicy, PauseMode
from agentloop_servers.cli.terminal import DEFAULT_URL, AdminKey, ApiKey, Url, clear_errors, run_to_end

T = TypeVar("T")

_DRAIN_POLL_S = 1.0

app = typer.Typer()
weights = typer.Typer(help="Push or publish weights.", no_args_is_help=True)
app.add_typer(weights, name="weights")


@app.command()
def status(url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Show the state of a running service."""
    service = asked(url, lambda client: client.status(), api_key=api_key, timeout_s=10.0, retry_timeout_s=2.0)
    _show_status(Console(), service)


@app.command()
def why(
    trajectory: Annotated[str | None, typer.Argument(help="A trajectory's id, as in `agentloop top`.")] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Explain why a service or a trajectory makes no progress, or is slow."""
    console = Console()
    for finding in asked(url, lambda client: client.why(trajectory), admin_key=admin_key, retry_timeout_s=2.0):
        console.print(f"{finding.text}\n  → {finding.action}", highlight=False, markup=False, soft_wrap=True)


@weights.command("push")
def push_weights(
    directory: Annotated[Path, typer.Argument(help="A folder of safetensors files that the service can read.")],
    version: Annotated[int, typer.Option(min=0, help="The version of the weights.")],
    url: Url = DEFAULT_URL,
    kv_policy: Annotated[KVPolicy | None, typer.Option(help="Handling of KV of older weights.")] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="The folder holds a LoRA adapter (PEFT).")] = False,
    name: Annotated[
        str | None, typer.Option(help="The adapter's name, if the service has several adapters.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Accept an older version, and weights that fail the canary check.")
    ] = False,
    admin_key: AdminKey = None,
) -> None:
    """Update every replica to new weights."""

    async def send(client: RolloutClient) -> UpdateReport:
        if adapter or name is not None:
            push = client.update_adapter(directory, version=version, name=name, kv_policy=kv_policy, force=force)
            return await push
        return await client.update_weights(directory, version=version, kv_policy=kv_policy, force=force)

    report = asked(url, send, admin_key=admin_key)
    console = Console()
    for replica in report.replicas:
        outcome = f"failed: {replica.error}" if replica.error else f"paused for {replica.stall_ms:.0f} ms"
        console.print(f"{replica.replica_id}  {outcome}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"version {report.version} live after {report.total_ms:.0f} ms", highlight=False)


@weights.command("publish")
def publish_weights(
    directory: Annotated[Path, typer.Argument(help="A folder of safetensors files.")],
    store: Annotated[str, typer.Option(help="A directory, or a URL such as s3://BUCKET/PREFIX.")],
    run: Annotated[str, typer.Option(help="The run's name, a folder of the store.")],
    version: Annotated[int, typer.Option(min=0, help="The version of the weights.")],
    encoding: Annotated[str, typer.Option(help="The encoding of deltas: xor or overwrite.")] = "xor",
    full_every: Annotated[int, typer.Option(min=1, help="Store full weights every N versions.")] = 16,
    cache: Annotated[str | None, typer.Option(help="A folder that caches the last version.")] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Publish weights as a version in a store that services follow."""

    async def send(client: RolloutClient) -> PublishReport:
        return await client.publish(
            directory, version=version, store=store, run=run, encoding=encoding, full_every=full_every, cache=cache
        )

    report = asked(url, send, admin_key=admin_key)
    kind = "full" if report.base_version is None else f"a delta to {report.base_version}"
    size = f"{report.num_bytes:,} bytes for {report.num_full_bytes:,}"
    Console().print(f"version {report.version} published: {kind}, {size}", highlight=False, soft_wrap=True)


@app.command()
def cancel(
    run: Annotated[str, typer.Argument(help="A rollout's id, as in `status`.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Cancel a rollout; each of its samples still gets a record."""
    left = asked(url, lambda client: client.cancel(run), api_key=api_key)
    Console().print(f"{run}: {left.num_finished} of {left.num_accepted} have their records", highlight=False)


@app.command()
def pause(
    mode: Annotated[PauseMode, typer.Option(help="Handling of requests in flight.")] = PauseMode.KEEP,
    reason: Annotated[str, typer.Option(help="A reason, which the status shows.")] = "",
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Pause generation on all replicas between two tokens, until `resume`."""
    asked(url, lambda client: client.pause(mode, reason=reason), admin_key=admin_key)
    Console().print("paused", highlight=False)


@app.command()
def resume(url: Url = DEFAULT_URL, admin_key: AdminKey = None) -> None:
    """Resume generation after `pause`."""
    asked(url, lambda client: client.resume(), admin_key=admin_key)
    Console().print("resumed", highlight=False)


@app.command()
def sleep(
    level: Annotated[
        int, typer.Option(min=1, max=2, help="1 keeps the weights in host memory; 2 discards them.")
    ] = 1,
    reason: Annotated[str, typer.Option(help="A reason, which the status shows.")] = "",
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Pause all replicas and release their memory, until `wake`."""
    asked(url, lambda client: client.sleep(level, reason=reason), admin_key=admin_key)
    Console().print(f"asleep at level {level}", highlight=False)


@app.command()
def wake(
    tag: Annotated[list[MemoryTag] | None, typer.Option(help="Only this kind of memory; may be repeated.")] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Allocate the released memory again; generation resumes when all of it is back."""
    asked(url, lambda client: client.wake(tag or None), admin_key=admin_key)
    Console().print(f"awake: {', '.join(tag) if tag else 'all'}", highlight=False)


@app.command()
def drain(
    host: Annotated[str, typer.Argument(help="A host's address, as in `status`.")],
    undo: Annotated[bool, typer.Option("--undo", help="Assign work to it again.")] = False,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Assign no more work to a host, and wait until it can be removed."""
    console = Console()

    async def drained(client: RolloutClient) -> None:
        with console.status("") as shown:
            while not (left := await client.drain(host, undo=undo)).may_go and not undo:
                shown.update(f"{left.num_running} trajectories run there, {left.num_leases} have a place there")
                await asyncio.sleep(_DRAIN_POLL_S)

    asked(url, drained, admin_key=admin_key)
    console.print(
        f"{host} gets work" if undo else f"{host} may go; sessions that it holds go with it", highlight=False
    )


def asked(url: str, ask: Callable[[RolloutClient], Awaitable[T]], **options: Any) -> T:
    """Call a service with a client; an error ends the command."""

    async def connected() -> T:
        async with RolloutClient(url, **{"retry_timeout_s": 5.0, **options}) as client:
            return await ask(client)

    with clear_errors():
        return run_to_end(connected())


def _waiting(service: ServiceStatus) -> str:
    queue = service.queue
    calls = f"; {waiting_calls(service)}" if queue.num_waiting else ""
    return f"{queue.num_queued} queued trajectories wait{calls}; {queue.reason}"


def in_thousands(num_tokens: int) -> str:
    """Return a number of tokens in short form."""
    return str(num_tokens) if num_tokens < 10_000 else f"{num_tokens / 1000:,.0f}k"


def described(service: ServiceStatus) -> str:
    """Return a line about a service's state and weights."""
    state = "paused" if service.is_paused else "ready" if service.is_ready else "not ready"
    if service.asleep:
        state = f"asleep ({', '.join(service.asleep)})"
    version = "none" if service.weight_version is None else str(service.weight_version)
    return f"{state}, weight version {version}"


def _show_status(console: Console, service: ServiceStatus) -> None:
    console.print(f"{described(service)}, {service.num_workers} worker(s)", highlight=False)
    if service.public_urls:
        console.print(f"at {', '.join(service.public_urls)}", highlight=False, soft_wrap=True)
    names = ("state", "engine", "version", "running", "waiting", "leases")
    has_hosts = len({replica.host for replica in service.replicas}) > 1
    hosts = (Column("host", no_wrap=True),) if has_hosts else ()
    replicas = Table(
        Column("replica", no_wrap=True), *hosts, *names, "KV used / predicted / limit", "hits", box=None
    )
    for replica in sorted(service.replicas, key=lambda replica: replica.host):
        own = "none" if replica.weight_version is None else str(replica.weight_version)
        numbers = (replica.load.num_running, replica.load.num_waiting, replica.num_leases)
        kv = (replica.load.kv_used_tokens, replica.kv_predicted_tokens, replica.kv_limit_tokens)
        hits = "-" if replica.kv_hit_rate is None else f"{replica.kv_hit_rate:.0%}"
        tokens = " / ".join(map(in_thousands, kv))
        where = (replica.host,) if has_hosts else ()
        state_of = (replica.state, replica.engine, own, *map(str, numbers))
        replicas.add_row(replica.replica_id, *where, *state_of, tokens, hits)
    console.print(replicas)
    for adapter in service.adapters:
        console.print(f"adapter {adapter.name}, version {adapter.version}", highlight=False)
    for hold in service.holds:
        lost = f", {len(hold.lost)} lost" if hold.lost else ""
        held = f"{', '.join(hold.replicas) or 'no replica'}{lost}"
        line = f"held at version {hold.version} for at most {hold.left_s:.0f} s more: {held}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if service.queue.reason:
        console.print(_waiting(service), highlight=False, markup=False, soft_wrap=True)
    said = "\n".join(service.degraded)
    lines = [
        *service.degraded,
        *(f"{one.replica_id}: {one.error}" for one in service.replicas if one.error and one.error not in said),
        *(f"replica {one.replica_id} was lost {one.age_s:.0f} s ago: {one.reason}" for one in service.lost),
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    rollouts = Table("rollout", "owner", "priority", "accepted", "finished", "running", "queued", "", box=None)
    for one in service.rollouts:
        numbers4 = (one.num_accepted, one.num_finished, one.num_running, one.num_queued)
        held = f"{one.num_held} of them held for the next version" if one.num_held > 0 else ""
        rollouts.add_row(one.rollout_id, one.owner or "-", str(one.priority), *map(str, numbers4), held)
    if service.rollouts:
        console.print(rollouts)
