"""`agentloop replay`: re-execute a recorded trajectory, and name the first difference and its cause."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agentloop.engine.interface import PublishedSource, WeightUpdate
from agentloop.errors import AgentLoopError, InvalidRequest
from agentloop.observability.logs import configure_logging
from agentloop.rollout.tool import load_tools
from agentloop.rollout.trajectory_run import WorkerConfig
from agentloop.storage.home import Home
from agentloop.storage.trajectory_store import TrajectoryReader, folder_of
from agentloop.types import RolloutTask, Trajectory
from agentloop_servers.chat_format.load import load_chat_format
from agentloop_servers.cli.records import find_record, record_names
from agentloop_servers.cli.terminal import PLAIN, clear_errors, find_modules_here, run_to_end, store_of
from agentloop_servers.config.engines import EngineEntry
from agentloop_servers.config.service import ServiceConfig, model_sizes
from agentloop_servers.processes.engine_parts import build_engine
from agentloop_servers.processes.shared import served_versions, tool_names
from agentloop_servers.run.store import resumed_config
from agentloop_verify.check_logprobs import parse_versions, versions_in
from agentloop_verify.replay import RecordedTurn, Replay, ReplayReport, obstacles, recorded_turns

app = typer.Typer()


@app.command("replay")
def command(
    run: Annotated[str, typer.Argument(help="Run directory, run id, or store file.")],
    trajectory: Annotated[str, typer.Argument(help="A task or group id, GROUP/SAMPLE, or ROLLOUT/GROUP/SAMPLE.")],
    to_turn: Annotated[int | None, typer.Option(min=1, help="Replay only the first N turns.")] = None,
    live_tools: Annotated[
        bool, typer.Option("--live-tools", help="Run the tools instead of using the recorded results.")
    ] = False,
    model_version: Annotated[
        list[str] | None, typer.Option(help="Checkpoint of version N, as N=DIR; may be repeated.")
    ] = None,
    versions: Annotated[
        Path | None, typer.Option(help="Folder of checkpoints whose names are their version numbers.")
    ] = None,
) -> None:
    """Re-execute a recorded trajectory. Exits with 0 if it is identical, and else names the first difference."""
    find_modules_here()
    configure_logging(None, level="debug", console_level="warning")
    with clear_errors(), tempfile.TemporaryDirectory(prefix="agentloop-replay-") as temporary:
        store = store_of(run)
        record = find_record(store, trajectory)
        with closing(TrajectoryReader(store)) as reader:
            group = reader.group(record.rollout_id, record.group_id)
        config = _config_of(store)
        turns = [*recorded_turns(record).values()][:to_turn]
        folders = {} if config.awaits_weights else {config.model_version: config.model_path()}
        folders |= {} if versions is None else versions_in(versions)
        folders |= parse_versions(model_version or [])
        folders |= run_to_end(_published(config, turns, folders, Path(temporary)))
        name, task = next(record_names(record)), None if group is None else group.task
        if missing := obstacles(record, task, turns, folders):
            raise InvalidRequest(f"{name} cannot be replayed: {'; '.join(missing)}", param="trajectory")
        assert task is not None
        report = run_to_end(_replayed(config, record, task, turns, folders, live_tools))
    console = Console()
    for line in report_lines(report):
        console.print(line, **PLAIN)
    if report.difference is not None:
        raise typer.Exit(1)


def report_lines(report: ReplayReport) -> list[str]:
    """Return a report as lines of text."""
    same = f"{report.num_turns} turns, {report.num_tokens:,} sampled tokens"
    rounding = f"largest distance of two logprobs {report.max_distance:.3g}"
    difference = report.difference
    if difference is None:
        return [f"identical: {same}, {rounding}"]
    token = "before its first token" if difference.token is None else f"sampled token {difference.token}"
    distance = "" if difference.distance is None else f", logprob distance {difference.distance:.3g}"
    return [
        f"first difference: turn {difference.turn}, {token}; cause: {difference.cause}{distance}",
        difference.detail,
        f"identical before it: {same}, {rounding}",
    ]


def _config_of(store: Path | Home) -> ServiceConfig:
    folder = folder_of(store)
    config = resumed_config(folder)
    if config is None:
        raise InvalidRequest(
            f"{folder} has no config of the service, which names the model and its engine: replay needs the"
            " complete run directory",
            param="run",
        )
    return config


async def _published(
    config: ServiceConfig, turns: Sequence[RecordedTurn], folders: dict[int, Path], temporary: Path
) -> dict[int, Path]:
    """Return local folders of the turns' versions that the followed store of published versions has."""
    found: dict[int, Path] = {}
    if config.weights is None:
        return found
    source = PublishedSource(config.weights.store, config.weights.run)
    for version in {version for one in turns for version in one.versions} - {*folders}:
        # A folder per version: a host's usual folder keeps only the newest ones.
        weights = config.weights.model_copy(update={"cache": str(temporary / str(version))})
        copies = served_versions(config.model_copy(update={"weights": weights}), temporary)
        try:
            update = await copies.located(WeightUpdate(version, published=source))
        except AgentLoopError as error:
            Console(stderr=True).print(f"version {version} is not in the store: {error}", **PLAIN)
            continue
        found[version] = Path(update.directory)
    return found


def _entry_of(config: ServiceConfig, turns: Sequence[RecordedTurn]) -> EngineEntry:
    """Return the engine pool of the kind that sampled the turns; otherwise the first pool."""
    kinds = {one.turn.engine for one in turns}
    return next((entry for entry in config.entries if entry.kind in kinds), config.entries[0])


async def _replayed(
    config: ServiceConfig,
    record: Trajectory,
    task: RolloutTask,
    turns: Sequence[RecordedTurn],
    folders: dict[int, Path],
    live_tools: bool,
) -> ReplayReport:
    entry = _entry_of(config, turns)
    engine, model = build_engine(config, entry), config.model_path()
    try:
        await engine.start()
        replay = Replay(
            record,
            task,
            {one.turn.turn_id: one for one in turns},
            engine,
            load_chat_format(model, config.chat),
            model_sizes(config).max_context_tokens,
            folders,
            None if entry.load_format == "dummy" else (config.model_version, model),
            WorkerConfig(kv_policy=config.kv_policy, default_top_k=config.default_top_k),
            load_tools(tool_names(config), config.tools),
            live_tools,
        )
        return await replay.run()
    finally:
        await engine.close()
