"""`agentloop doctor`: checks this machine for the service's requirements, and a model folder for its chat format.

It starts nothing, and imports Ray only to check a cluster. The check of a model folder takes about a second.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, cast

import pydantic_monty
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentloop import __version__
from agentloop.api.requests import MAX_SCORES_BYTES
from agentloop.errors import AgentLoopError
from agentloop.parts import PARTS
from agentloop.plugins import DISTRIBUTION, resolve
from agentloop.rendering.port import ModelFacts, Renderer
from agentloop.rendering.renderer import TextOnlyRenderer
from agentloop.values.checks import MAX_TOP_LOGPROBS
from agentloop_servers.chat_format.load import ChatFormat, load_parser, load_renderer
from agentloop_servers.cli import load
from agentloop_servers.cluster.host import NICENESS
from agentloop_servers.config.models import with_model_folders
from agentloop_servers.config.service import ServiceConfig, located, model_sizes, weight_bytes
from agentloop_servers.engines.common.versions import DRIVEN, objection

ENGINE_COMMAND = "agentloop_servers.processes.engine_parts:vllm_command"
MIN_FREE_MEMORY_GIB = 4.0  # two CPU replicas of the shipped policy with their engines' Python processes
PROCESS_GIB = 1.5  # per replica on a CPU: two Python processes with torch and an engine
MIN_FREE_DISK_GIB = 1.0
_PROBE_TIMEOUT_S = 20.0
_TEMPLATE_FILES = ("chat_template.jinja", "additional_chat_templates/tool_use.jinja", "chat_template.json")


@dataclass(frozen=True, slots=True)
class Check:
    """One result; if a check with `is_needed` is not ok, the service cannot run."""

    name: str
    is_ok: bool
    detail: str
    is_needed: bool = True


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _group() -> None:
    """Keep `doctor` a word of the command line, as it is among the other commands."""


@app.command()
def doctor(
    model: Annotated[
        str | None,
        typer.Option(
            help="A model, to see how a service would render and read it: a folder, a name of"
            " `agentloop models list`, a Hugging Face id, or a .gguf file."
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A Serve config: its model, with its chat settings.")] = None,
    parser: Annotated[str | None, typer.Option(help="A parser, as `chat.parser` of a config.")] = None,
    renderer: Annotated[str | None, typer.Option(help="A renderer, as `chat.renderer` of a config.")] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Each node of this host's Ray cluster, for the service of --config.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Check this machine, or a model folder. Exits with 1 if something needed is broken or would be refused."""
    if cluster:
        checks = _clustered(config, as_json=as_json)
    elif model is None and config is None:
        if parser is not None or renderer is not None:
            raise typer.BadParameter("--parser and --renderer need --model or --config")
        checks = examine()
    else:
        checks = _examined(model, config, {"parser": parser, "renderer": renderer})
    is_good = all(check.is_ok or not check.is_needed for check in checks)
    if as_json:
        typer.echo(json.dumps({"ok": is_good, "checks": [asdict(check) for check in checks]}, ensure_ascii=False))
    else:
        _show(checks)
    if not is_good:
        raise typer.Exit(1)


def _examined(model: str | None, config: Path | None, chat: dict[str, str | None]) -> list[Check]:
    """Examine a model; a config that cannot be read is the finding."""
    changed = {name: value for name, value in chat.items() if value is not None}
    try:
        settings = (
            ServiceConfig.load(located(str(config))) if config is not None else ServiceConfig(model=str(model))
        )
        if model is not None:
            settings = settings.model_copy(update={"model": model})
        try:
            settings = with_model_folders(settings, lambda line: typer.echo(line, err=True))
        except AgentLoopError as error:
            return [Check("model", False, error.message)]
        changed_chat = settings.chat.model_copy(update=changed)
        return examine_model(settings.model_copy(update={"chat": changed_chat}))
    except AgentLoopError as error:
        return [Check("config", False, error.message)]


def _clustered(config: Path | None, *, as_json: bool) -> list[Check]:
    """Check the nodes of a cluster, and show them in one table."""
    if config is None:
        raise typer.BadParameter("--cluster needs --config")
    examine_cluster = load("doctor_cluster").examine_cluster  # imports Ray
    try:
        checks, table = examine_cluster(ServiceConfig.load(located(str(config))), "auto")
    except AgentLoopError as error:
        return [Check("cluster", False, error.message)]
    if not as_json:
        Console().print(table)
    return [check for check in cast(list[Check], checks) if as_json or not check.is_ok]


def _show(checks: Sequence[Check]) -> None:
    if not checks:
        return
    table = Table("check", "", "found", box=None)
    for check in checks:
        mark = "ok" if check.is_ok else "BROKEN" if check.is_needed else "-"
        table.add_row(check.name, mark, Text(check.detail, overflow="fold"))
    Console().print(table)


def examine() -> list[Check]:
    """Return all checks of this machine. Takes one or two seconds and starts nothing."""
    gpu = _probed("gpu", _gpu, is_needed=False)
    engines = [_driven("vllm"), _sglang(has_gpu=gpu.is_ok)]
    driven = ", ".join(f"{name} {' or '.join(versions)}" for name, versions in DRIVEN.items())
    return [
        _python(),
        _distribution(),
        _parts(),
        package("ray"),
        package("torch", is_needed=False),
        *engines,
        Check("an engine", any(engine.is_ok for engine in engines), f"{driven}; simulated engines need none"),
        Check("cpu", True, f"{os.cpu_count()} cores, {platform.machine()}"),
        gpu,
        _probed("memory", _memory),
        _probed("disk", _disk),
        _probed("sandbox", _sandbox),
        _probed("shell sandbox", _shell, is_needed=False),
        _ray_token(),
        _ray_niceness(),
        _probed("a free port", _port),
    ]


def _python() -> Check:
    version = platform.python_version()
    return Check("python", (3, 11) <= sys.version_info[:2] < (3, 14), version)


def _distribution() -> Check:
    """Report other distributions with a package `agentloop`: the last installed one overwrites the other."""
    found = importlib.metadata.packages_distributions().get("agentloop", [])
    if foreign := sorted({one for one in found if one != DISTRIBUTION}):
        return Check("agentloop", False, f"also installed by {', '.join(foreign)}: uninstall both")
    return Check("agentloop", True, __version__)


def _parts() -> Check:
    there = [part.package for part in PARTS if part.is_there]
    missing = [part.package for part in PARTS if not part.is_there]
    detail = ", ".join(there) + (f"; not installed: {', '.join(missing)}" if missing else "")
    return Check("parts", not missing, detail, is_needed=False)


def _ray_token() -> Check:
    """Check that Ray requires its token: without it, its ports run code of any client."""
    mode = os.environ.get("RAY_AUTH_MODE")
    if mode is None:
        return Check("ray's token", True, "required on a local Ray; a cluster needs its own setting", False)
    detail = "required" if mode == "token" else f"not required: RAY_AUTH_MODE is {mode}, Ray's ports are open"
    return Check("ray's token", mode == "token", detail, is_needed=False)


def _ray_niceness() -> Check:
    """Check the priority of Ray's actors: engines on GPUs need nice 0."""
    nice = os.environ.get(NICENESS)
    if nice is None:
        return Check(
            "ray's priority",
            True,
            f"nice 0 with `serve`; start a cluster with {NICENESS}=0",
            False,
        )
    return Check("ray's priority", nice == "0", f"{NICENESS} is {nice}; engines on GPUs need 0", is_needed=False)


def package(name: str, *, is_needed: bool = True) -> Check:
    """Find a package without importing it: importing an engine takes long and may use a GPU."""
    if importlib.util.find_spec(name) is None:
        return Check(name, False, "not installed", is_needed)
    distributions = importlib.metadata.packages_distributions().get(name, [name])
    versions = [f"{found} {importlib.metadata.version(found)}" for found in sorted(set(distributions))]
    return Check(name, True, ", ".join(versions), is_needed)


def _driven(engine: str) -> Check:
    """Find an engine, and check that its version is supported."""
    check = package(engine, is_needed=False)
    said = objection(engine, check.detail.split()[-1]) if check.is_ok else ""
    return Check(engine, False, f"{check.detail}; {said}", False) if said else check


def _sglang(*, has_gpu: bool) -> Check:
    """Find SGLang, and check its requirements: a GPU, and a package of kernels."""
    check = _driven("sglang")
    if not check.is_ok:
        return check
    if not has_gpu:
        return Check("sglang", False, f"{check.detail}; its wheels run on NVIDIA GPUs only", False)
    kernels = package("sgl_kernel", is_needed=False)
    return Check("sglang", kernels.is_ok, f"{check.detail}, its kernels: {kernels.detail}", False)


def _probed(name: str, probe: Callable[[], tuple[bool, str]], *, is_needed: bool = True) -> Check:
    try:
        is_ok, detail = probe()
    except Exception as error:  # a probe that raises is a failed check
        is_ok, detail = False, f"{type(error).__name__}: {error}"
    return Check(name, is_ok, detail, is_needed)


def _gpu() -> tuple[bool, str]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return False, "not found; the CPU lane needs no GPU"
    query = [command, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False)
    return answer.returncode == 0, "; ".join((answer.stdout or answer.stderr).strip().splitlines())


def _memory(wanted_gib: float = MIN_FREE_MEMORY_GIB) -> tuple[bool, str]:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free_gib = int(lines["MemAvailable"].split()[0]) / 2**20
    return free_gib >= wanted_gib, f"{free_gib:.1f} GiB free, {wanted_gib:.1f} needed"


def _disk() -> tuple[bool, str]:
    free_gib = shutil.disk_usage(Path.cwd()).free / 2**30
    return free_gib >= MIN_FREE_DISK_GIB, f"{free_gib:.1f} GiB free here"


def _sandbox() -> tuple[bool, str]:
    version = importlib.metadata.version("pydantic-monty")
    with (
        pydantic_monty.Monty(max_processes=1, request_timeout=_PROBE_TIMEOUT_S) as pool,
        pool.checkout() as session,
    ):
        answer = session.feed_run("6 * 7")
    return answer == 42, f"pydantic-monty {version} computes 6 * 7 = {answer}"


def _shell() -> tuple[bool, str]:
    refusal = cast(Callable[[], str | None], resolve("agentloop_tools.sandbox.bubblewrap:refusal", param="tools"))
    why_not = refusal()
    return why_not is None, why_not or "bubblewrap isolates commands: the shell tool runs here"


def _port() -> tuple[bool, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return True, f"127.0.0.1:{probe.getsockname()[1]}"


def examine_model(config: ServiceConfig) -> list[Check]:
    """Return all checks of a service's model. Takes about a second."""
    checks: list[Check] = []
    try:
        folder = config.model_path()
        checks.append(Check("model", True, str(folder)))
        sizes = model_sizes(config)
        checks.append(Check("context", True, f"{sizes.max_context_tokens:,} tokens"))
        checks += _memory_of(config)
        checks += _scores_of(config)
        checks += _engine_commands(config)
    except AgentLoopError as error:
        return [*checks, Check("config.json", False, error.message)]
    try:
        renderer = load_renderer(folder, config.chat)
    except AgentLoopError as error:
        return [*checks, Check("chat format", False, error.message)]
    try:
        chosen = load_parser(folder, config.chat, renderer)
    except AgentLoopError as error:
        return [*checks, *_of_renderer(renderer, config), Check("parser", False, error.message)]
    return [*checks, *_of_renderer(chosen.renderer, config), *_of_parser(chosen)]


def _engine_commands(config: ServiceConfig) -> Iterator[Check]:
    """Show the command line of each vLLM pool with `engine.arguments`. Imports vLLM."""
    for entry in config.entries:
        if entry.kind == "vllm" and entry.arguments and importlib.util.find_spec("vllm") is not None:
            # Loaded only here: `doctor` also runs where no engine and no Ray is installed.
            command_of = cast(Callable[..., str], resolve(ENGINE_COMMAND, param="engine.arguments"))
            try:
                yield Check(f"engine {entry.name}", True, command_of(config, entry))
            except (AgentLoopError, ValueError) as error:
                yield Check(f"engine {entry.name}", False, str(error))


def _memory_of(config: ServiceConfig) -> Iterator[Check]:
    """Compare this host's free memory with the needs of the replicas on its CPU."""
    on_cpu = [entry for entry in config.entries if entry.kind != "simulated" and not entry.on_gpu]
    if on_cpu:
        # A push stages a second copy of the weights.
        each = [
            2 * weight_bytes(config) / 2**30 + (entry.kv_cache_mib or 0) / 2**10 + PROCESS_GIB for entry in on_cpu
        ]
        wanted = sum(gib * entry.replicas for gib, entry in zip(each, on_cpu, strict=True))
        yield _probed("memory", lambda: _memory(wanted))


def _scores_of(config: ServiceConfig) -> Iterator[Check]:
    """Show the memory of scores with more alternatives than by default."""
    most = config.entries[0].max_logprobs  # equal in all engine pools
    if most != MAX_TOP_LOGPROBS:
        mib = MAX_SCORES_BYTES / 2**20
        limit = "the vocabulary's" if most == -1 else f"up to {most}"
        text = (
            f"{limit} alternatives per token; the largest answer takes {mib:.0f} MiB in the engine and the ingress"
        )
        yield Check("scores", True, text)


def _of_renderer(renderer: Renderer, config: ServiceConfig) -> Iterator[Check]:
    facts = renderer.facts
    stops = [
        f"{text} {token_id}" for text, token_id in zip(facts.stop_tokens, renderer.stop_token_ids, strict=False)
    ]
    # A base model is served without chat, so this is not an error.
    has_chat = not isinstance(renderer, TextOnlyRenderer)
    yield Check(
        "chat format", has_chat, _format_of(config) if has_chat else TextOnlyRenderer.objection, is_needed=has_chat
    )
    yield Check("vocabulary", True, f"{renderer.vocab_size:,} ids, {len(facts.literals)} of them marks")
    yield Check("stop tokens", True, ", ".join(stops))
    if has_chat:
        yield from _of_turns(facts, config)


def _of_turns(facts: ModelFacts, config: ServiceConfig) -> Iterator[Check]:
    shown = (
        "shown to the model" if facts.shows_calls else "shown to the model; its earlier calls in their sampled form"
    )
    objection = f"refused: {facts.tools_objection}"
    yield Check("tools", facts.supports_tools, shown if facts.supports_tools else objection, is_needed=False)
    if facts.supports_tools:
        yield _bridge("tool results", facts.tool_turns)
        yield _bridge("user, with tools", facts.user_turns)
    yield _bridge("user, no tools", facts.plain_turns)
    if facts.plain_turns is not None:
        yield Check("earlier reasoning", True, "as the chat format renders it; the path forks there")
    elif not facts.strips_thinking:
        yield Check("earlier reasoning", True, "as it was sampled; the chat format drops none")
    elif config.chat.thinking == "keep":
        yield Check("earlier reasoning", True, "kept; the chat format itself drops it at a user message")
    else:
        yield Check("earlier reasoning", True, "dropped at a user message, as in the chat format: the path forks")


def _format_of(config: ServiceConfig) -> str:
    """Return the renderer, and the file of its template."""
    settings, folder = config.chat, config.model_path()
    if settings.renderer != "template":
        return settings.renderer
    if settings.template.file is not None:
        return f"template: {settings.template.file}"
    files = [name for name in _TEMPLATE_FILES if (folder / name).is_file()]
    return f"template: {' and '.join(files) or 'tokenizer_config.json'}"


def _bridge(name: str, problem: str | None) -> Check:
    """Check how a conversation continues: by an exact bridge, or by a fork, which is correct but renders again."""
    return Check(name, problem is None, f"fork: {problem}" if problem else "bridged exactly", is_needed=False)


def _of_parser(chosen: ChatFormat) -> Iterator[Check]:
    if isinstance(chosen.renderer, TextOnlyRenderer):
        return
    test = chosen.test
    opened = ", opened by the prompt" if test.opens_reasoning else ""
    has_reasoning, marks = test.reasoning or test.opens_reasoning, chosen.parser.delimiters.reasoning
    thoughts = f"{marks.open} {marks.close}{opened}" if has_reasoning else "not written"
    yield Check("reasoning", has_reasoning, thoughts, is_needed=False)
    yield Check("parser", True, f"{chosen.name}: {chosen.reason}")
    read = ["an answer", *(["reasoning"] if test.reasoning else []), *(["a call"] if test.call_text else [])]
    yield Check("self-test", True, f"{', '.join(read)}: rendered and parsed again")
    if test.call_text:
        yield Check("a call", True, test.call_text.strip().replace("\n", "⏎"))
