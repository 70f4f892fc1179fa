"""The commands of `agentloop`. Each is a few lines over the SDK, the store or the local service.

Exit codes: 0 good; 1 a clear error, lost trajectories, or something needed is broken; 2 wrong usage; 130 Ctrl-C;
143 SIGTERM.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import orjson
import typer
from rich.console import Console
from rich.table import Column, Table

from agentloop import codec
from agentloop.api import QueueStatus, ServiceStatus, UpdateReport
from agentloop.client import RolloutClient
from agentloop.engine import MemoryTag
from agentloop.errors import AgentLoopError, InvalidRequest
from agentloop.export import export
from agentloop.logs import LOG_NAME, configure_logging
from agentloop.storage import STORE_NAME
from agentloop.trainers import MAX_K3
from agentloop.types import KVPolicy, OnStale, StalenessLimit
from agentloop_servers.cli.check_logprobs import check_logprobs, load_reference, parse_versions, tables, versions_in
from agentloop_servers.cli.doctor import doctor
from agentloop_servers.cli.progress import summary_table
from agentloop_servers.cli.run import (
    AgentCollect,
    RunOptions,
    WeightPush,
    end_on_sigterm,
    link_latest,
    load_program,
    run_rollout,
    stop_on_sigterm,
)
from agentloop_servers.config import ServiceConfig, located, new_run_dir, saved_config
from agentloop_servers.local import drain, running_service
from agentloop_servers.locks import take_run_lock

T = TypeVar("T")

app = typer.Typer(
    help="Asynchronous rollouts of language-model agents for reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
weights = typer.Typer(help="Weights of a running service.", no_args_is_help=True)
app.add_typer(weights, name="weights")


class Format(StrEnum):
    """File formats that `export` writes."""

    PARQUET = "parquet"
    JSONL = "jsonl"


class Device(StrEnum):
    """Devices that `check-logprobs` computes on; auto is CUDA where there is one."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Precision(StrEnum):
    """Types that `check-logprobs` computes in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


Config = Annotated[Path, typer.Option("--config", help="A Serve config file.")]
Out = Annotated[Path, typer.Option("--out", help="Where run directories go.")]
Url = Annotated[str, typer.Option("--url", envvar="AGENTLOOP_URL", help="The service.")]
ApiKey = Annotated[str | None, typer.Option("--api-key", envvar="AGENTLOOP_KEY", help="A user key.")]
Keep = Annotated[
    int | None, typer.Option(min=1, help="Keep the first so many complete ones of each task; cancel the rest.")
]
AdminKey = Annotated[str | None, typer.Option("--admin-key", envvar="AGENTLOOP_ADMIN_KEY", help="The admin key.")]

SHIPPED_PUSH = Path("examples/tiny_policy/v1")
DEFAULT_CONFIG = Path("servers/cpu.yaml")
DEFAULT_URL = "http://127.0.0.1:8000"


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option("--config", help=f"A Serve config file; {DEFAULT_CONFIG}.")] = None,
    out: Out = Path("runs"),
    resume: Annotated[
        str | None,
        typer.Option(help="A run directory, or its id, to go on with: queue, sessions, weights, records."),
    ] = None,
    grace_s: Annotated[
        float, typer.Option(min=0.0, help="After SIGTERM, the seconds that running trajectories have to end.")
    ] = 30.0,
) -> None:
    """Run the service on a local Ray of its own, until Ctrl-C, or SIGTERM, which lets running trajectories end."""
    with _clear_errors():
        run_dir = None if resume is None else _store_of(resume).parent
        saved = None if run_dir is None or config is not None else saved_config(run_dir)
        settings = saved or ServiceConfig.load(located(str(config or DEFAULT_CONFIG)))
        if run_dir is None:
            run_dir = new_run_dir(out) if settings.run_dir is None else Path(settings.run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        _run(_serve(settings, run_dir, grace_s, is_resumed=(run_dir / STORE_NAME).is_file()))


@app.command()
def rollout(
    tasks: Annotated[Path, typer.Option(help="Tasks, one JSON object a line.")] = Path("examples/data/tasks.jsonl"),
    samples: Annotated[int, typer.Option(min=1, max=1024, help="Trajectories of each task.")] = 2,
    keep: Keep = None,
    config: Config = DEFAULT_CONFIG,
    push: Annotated[
        Path | None,
        typer.Option(
            help=f"Weights to push while trajectories are in flight; {SHIPPED_PUSH} for the shipped config."
        ),
    ] = None,
    no_push: Annotated[bool, typer.Option("--no-push", help="Push nothing.")] = False,
    push_version: Annotated[int, typer.Option(min=0, help="The version they become.")] = 1,
    push_after: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Push once this share of the trajectories has finished.")
    ] = 0.25,
    max_staleness: Annotated[
        int | None, typer.Option(min=0, help="How many weight versions a trajectory may fall behind; 0: on-policy.")
    ] = None,
    on_stale: Annotated[
        OnStale | None, typer.Option(help="What becomes of one that falls further behind; finish if left out.")
    ] = None,
    trajectories_per_version: Annotated[
        int | None, typer.Option(min=1, help="Begin no more than a trainer of this many a version takes in time.")
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(
            help="Your own agent, my_module:run, as run(task, base_url, api_key); it returns a reward or None."
        ),
    ] = None,
    agent_command: Annotated[
        str | None,
        typer.Option(help="Your own agent as a command; it finds OPENAI_BASE_URL, OPENAI_API_KEY, AGENTLOOP_TASK."),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Runs of your agent at once.")] = 16,
    out: Out = Path("runs"),
) -> None:
    """Start a service, roll out a task file, write a run directory, stop everything."""
    console = _console()
    limit = _limit(max_staleness, on_stale, trajectories_per_version)
    if limit is not None and (agent is not None or agent_command is not None):
        raise typer.BadParameter("--max-staleness is for the service's own loops, not for --agent")
    with _clear_errors():
        settings = ServiceConfig.load(located(str(config)))
        source = SHIPPED_PUSH if push is None and config == DEFAULT_CONFIG else push
        is_pushing = source is not None and not no_push
        weight_push = WeightPush(located(str(source)), push_version, push_after) if is_pushing else None
        options = RunOptions(located(str(tasks)), samples, out, weight_push, limit, keep)
        program = load_program(agent, agent_command, settings)
        collect_with = None if program is None else AgentCollect(program, concurrency)
        try:
            result = _run(run_rollout(settings, options, console, collect_with))
        finally:
            if program is not None:
                program.close()
    console.print(summary_table(result.summary))
    console.print(f"written to {result.run_dir}", highlight=False, soft_wrap=True)
    if not result.is_good:
        raise typer.Exit(1)


@app.command("export")
def export_run(
    run: Annotated[str, typer.Argument(help="A run directory, a run's id, or a store file.")],
    format: Annotated[Format, typer.Option(help="The file format.")] = Format.PARQUET,
    out: Annotated[Path | None, typer.Option(help="The file; beside the store if left out.")] = None,
    rollout_id: Annotated[str | None, typer.Option(help="Only this rollout.")] = None,
    mask_constrained: Annotated[
        bool, typer.Option(help="Take tokens that a grammar, a bias or min_tokens shaped out of the mask.")
    ] = False,
) -> None:
    """Write a run's trajectories, also while it is running."""
    with _clear_errors():
        store = _store_of(run)
        target = out if out is not None else store.parent / f"trajectories.{format.value}"
        num_rows = export(store, target, format.value, rollout_id, mask_constrained=mask_constrained)
    _console().print(f"{num_rows} rows in {target}", highlight=False, soft_wrap=True)


@app.command("check-logprobs")
def check_run(
    run: Annotated[str, typer.Argument(help="A run directory, a run's id, or a store file.")],
    model: Annotated[Path, typer.Option(help="The checkpoint of the run's oldest version that has no other.")],
    model_version: Annotated[
        list[str] | None, typer.Option(help="N=DIR: the checkpoint of version N; may be repeated.")
    ] = None,
    versions: Annotated[
        Path | None, typer.Option(help="A folder of checkpoints that are named by their versions.")
    ] = None,
    device: Annotated[Device, typer.Option(help="Where to compute.")] = Device.AUTO,
    dtype: Annotated[Precision, typer.Option(help="What to compute in: your trainer's.")] = Precision.FLOAT32,
    trajectories: Annotated[int, typer.Option(min=1, help="Look at no more than these, chosen at random.")] = 1000,
    max_k3: Annotated[float, typer.Option(min=0.0, help="Exit with 1 if the k3-KL by span is above it.")] = MAX_K3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Compare a run's recorded logprobs with those of the checkpoints that sampled them."""
    with _clear_errors(), Console(stderr=True).status("loading") as progress:
        store, named = _store_of(run), parse_versions(model_version or [])
        if versions is not None:
            named = {**versions_in(versions), **named}
        load = load_reference(device.value, dtype.value)
        found = check_logprobs(
            store, model, named, load, max_trajectories=trajectories, on_progress=progress.update
        )
    if as_json:
        typer.echo(orjson.dumps(codec.to_builtins(found)))
    else:
        console = _console()
        for table in tables(found):
            console.print(table)
        for reason, num_tokens in found.left_out.items():
            console.print(f"left out: {num_tokens:,} tokens, {reason}", highlight=False)
        line = f"{found.num_trajectories:,} of {found.num_stored:,} trajectories, {dtype.value}"
        console.print(line, highlight=False)
    if found.k3_by_span is None or found.k3_by_span > max_k3:
        raise typer.Exit(1)


@app.command()
def status(url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Show a running service."""

    async def ask() -> ServiceStatus:
        async with RolloutClient(url, api_key=api_key, timeout_s=10.0, retry_timeout_s=2.0) as client:
            return await client.status()

    with _clear_errors():
        _show_status(_console(), _run(ask()))


@weights.command("push")
def push_weights(
    directory: Annotated[Path, typer.Argument(help="A folder of safetensors files that the service can read.")],
    version: Annotated[int, typer.Option(min=0, help="The version they become.")],
    url: Url = DEFAULT_URL,
    kv_policy: Annotated[KVPolicy | None, typer.Option(help="What happens to older KV.")] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="The folder holds a LoRA adapter (PEFT).")] = False,
    force: Annotated[bool, typer.Option("--force", help="The version may be older than the served one.")] = False,
    admin_key: AdminKey = None,
) -> None:
    """Bring every replica to new weights."""

    async def send(client: RolloutClient) -> UpdateReport:
        if adapter:
            return await client.update_adapter(directory, version=version, kv_policy=kv_policy, force=force)
        return await client.update_weights(directory, version=version, kv_policy=kv_policy, force=force)

    with _clear_errors():
        report = _run(_as_admin(url, admin_key, send))
    console = _console()
    for replica in report.replicas:
        outcome = f"failed: {replica.error}" if replica.error else f"stood still for {replica.stall_ms:.0f} ms"
        console.print(f"{replica.replica_id}  {outcome}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"version {report.version} live after {report.total_ms:.0f} ms", highlight=False)


@app.command()
def sleep(
    level: Annotated[int, typer.Option(min=1, max=2, help="2 also discards the weights.")] = 1,
    reason: Annotated[str, typer.Option(help="What it is for, as the status shows it.")] = "",
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Freeze all replicas and give their memory back, until `wake`."""
    with _clear_errors():
        _run(_as_admin(url, admin_key, lambda client: client.sleep(level, reason=reason)))
    _console().print(f"asleep at level {level}", highlight=False)


@app.command()
def wake(
    tag: Annotated[list[MemoryTag] | None, typer.Option(help="Only this memory; may be repeated.")] = None,
    url: Url = DEFAULT_URL,
    admin_key: AdminKey = None,
) -> None:
    """Take memory back; once all of it is, generation goes on."""
    with _clear_errors():
        _run(_as_admin(url, admin_key, lambda client: client.wake(tag or None)))
    _console().print(f"awake: {', '.join(tag) if tag else 'all'}", highlight=False)


app.command()(doctor)


def _limit(
    max_staleness: int | None, on_stale: OnStale | None, trajectories_per_version: int | None
) -> StalenessLimit | None:
    if max_staleness is not None:
        return StalenessLimit(max_staleness, on_stale or OnStale.FINISH, trajectories_per_version)
    if on_stale is not None or trajectories_per_version is not None:
        raise typer.BadParameter("--on-stale and --trajectories-per-version need --max-staleness")
    return None


async def _as_admin(url: str, admin_key: str | None, ask: Callable[[RolloutClient], Awaitable[T]]) -> T:
    async with RolloutClient(url, admin_key=admin_key, retry_timeout_s=5.0) as client:
        return await ask(client)


async def _serve(config: ServiceConfig, run_dir: Path, grace_s: float, *, is_resumed: bool) -> None:
    """Raises Conflict if a service runs in the directory."""
    (await take_run_lock(run_dir, 0.0)).release()  # the coordinator holds it from its start on
    link_latest(run_dir)
    configure_logging(run_dir / LOG_NAME, rotation=config.log.rotation)
    console = _console()
    begins = "going on" if is_resumed else "starting"
    console.print(f"{begins}; log and trajectories in {run_dir}", highlight=False, soft_wrap=True)
    waits_for_weights = is_resumed or config.awaits_weights
    async with running_service(config, run_dir, waits_for_weights=waits_for_weights) as url:
        stopping = stop_on_sigterm()  # Ray has set its own handler
        console.print(f"ready at {url}   (Ctrl-C stops it)", highlight=False, soft_wrap=True)
        console.print(f"chat     {url}/v1", highlight=False, soft_wrap=True)
        await stopping.wait()
        num_left = await drain(run_dir, grace_s)
    if num_left > 0:
        line = f"stopped; {num_left} trajectories go on with: agentloop serve --resume {run_dir}"
        console.print(line, highlight=False, soft_wrap=True)


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end; Ctrl-C and SIGTERM cancel it and are answered once everything has been cleaned up."""

    async def guarded() -> T:
        end_on_sigterm()
        return await work

    try:
        return asyncio.run(guarded())
    except KeyboardInterrupt as stop:
        Console(stderr=True).print("interrupted; everything that was started is stopped")
        raise typer.Exit(130) from stop
    except asyncio.CancelledError as stop:
        raise typer.Exit(143) from stop


@contextmanager
def _clear_errors() -> Iterator[None]:
    """One line for what went wrong, instead of a traceback."""
    try:
        yield
    except* (AgentLoopError, OSError) as group:
        for error in _leaves(group):
            Console(stderr=True).print(f"error: {error}", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(1) from group


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _console() -> Console:
    return Console()


def _store_of(run: str) -> Path:
    for path in (Path(run), Path("runs") / run):
        if (path / STORE_NAME).is_file():
            return path / STORE_NAME
        if path.is_file():
            return path
    raise InvalidRequest(f"no run {run!r}: no {STORE_NAME} there, nor in runs/{run}")


def _waiting(queue: QueueStatus) -> str:
    calls = f" and {queue.num_waiting} session(s) and calls" if queue.num_waiting else ""
    return f"{queue.num_queued} queued trajectories{calls} wait: {queue.reason}"


def _in_thousands(num_tokens: int) -> str:
    return str(num_tokens) if num_tokens < 10_000 else f"{num_tokens / 1000:,.0f}k"


def _show_status(console: Console, service: ServiceStatus) -> None:
    state = "paused" if service.is_paused else "ready" if service.is_ready else "not ready"
    if service.asleep:
        state = f"asleep ({', '.join(service.asleep)})"
    version = "none" if service.weight_version is None else str(service.weight_version)
    console.print(f"{state}, weight version {version}, {service.num_workers} worker(s)", highlight=False)
    names = ("state", "engine", "version", "running", "waiting", "leases")
    replicas = Table(Column("replica", no_wrap=True), *names, "KV used / predicted / limit", "hits", box=None)
    for replica in service.replicas:
        own = "none" if replica.weight_version is None else str(replica.weight_version)
        numbers = (replica.load.num_running, replica.load.num_waiting, replica.num_leases)
        kv = (replica.load.kv_used_tokens, replica.kv_predicted_tokens, replica.kv_limit_tokens)
        hits = "-" if replica.kv_hit_rate is None else f"{replica.kv_hit_rate:.0%}"
        tokens = " / ".join(map(_in_thousands, kv))
        replicas.add_row(replica.replica_id, replica.state, replica.engine, own, *map(str, numbers), tokens, hits)
    console.print(replicas)
    if service.queue.reason:
        console.print(_waiting(service.queue), highlight=False, markup=False, soft_wrap=True)
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
