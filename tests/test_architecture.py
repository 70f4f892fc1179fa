"""The architecture: allowed imports between packages, no cycles, and the public interface of each package."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from agentloop.parts import PARTS

ROOT = Path(__file__).parents[1]
SOURCES = {
    "agentloop": ROOT / "agentloop",
    "agentloop_servers": ROOT / "servers" / "agentloop_servers",
}
# A part imports the core and no other part. Parts under servers/ may import the service and engines.
PART_SOURCES = {
    part.package: next(
        ROOT / top / part.package for top in ("servers", "tools") if (ROOT / top / part.package).is_dir()
    )
    for part in PARTS
}
ENGINES = {"vllm", "sglang", "torch", "transformers"}
FORBIDDEN = {
    "agentloop": {"agentloop_servers", "examples", "tests", "ray", "fastapi", *ENGINES, *PART_SOURCES},
    "agentloop_servers": {"examples", "tests", *PART_SOURCES},
}
MAY_IMPORT_ENGINES = {
    "agentloop_servers.engines.vllm",
    "agentloop_servers.weight_transfer",
}

# Modules that any package may import; each of them imports only earlier ones.
COMMON = (
    "errors",
    "images",
    "values.sampling",
    "values.capabilities",
    "values.endings",
    "values.aux_rows",
    "types",
    "score",
    "values.codec",
    "concurrency.strides",
    "concurrency.clock",
    "observability.logs",
    "concurrency.aio",
    "plugins",
    "parts",
    "values.vocabulary",
    "engine.interface",
    "values.sampled_tokens",
    "engine.adapters",
    "engine.lifecycle",
    "engine.request_watch",
    "values.checks",
    "engine.weight_digest",
    "engine.canary",
    "values.mismatch",
    "observability.metrics",
    "observability.trace_context",
)
# Packages whose modules are ordered in levels.
OF_MODULES = {
    *(f"agentloop.{name.split('.')[0]}" for name in COMMON if "." in name),
    *(f"agentloop_servers.{name}" for name in ("cluster", "config", "engines", "net", "processes", "run")),
}

# The packages from bottom to top, and the packages that each may import in addition to COMMON.
ARROWS: dict[str, set[str]] = {
    "agentloop.api": set(),
    "agentloop.parsers": set(),
    "agentloop.trajectory": set(),
    "agentloop.simulation": set(),
    "agentloop.client": {"agentloop.api"},
    "agentloop.rendering": {"agentloop.parsers"},
    "agentloop.storage": {"agentloop.api"},
    "agentloop.fleet": {"agentloop.api"},
    "agentloop.scheduling": {"agentloop.api", "agentloop.fleet"},
    "agentloop.generation": {
        "agentloop.api",
        "agentloop.parsers",
        "agentloop.rendering",
        "agentloop.trajectory",
    },
    "agentloop.chat": {
        "agentloop.api",
        "agentloop.generation",
        "agentloop.parsers",
        "agentloop.rendering",
        "agentloop.trajectory",
    },
    "agentloop.rollout": {
        "agentloop.api",
        "agentloop.generation",
        "agentloop.parsers",
        "agentloop.rendering",
        "agentloop.trajectory",
        "agentloop.storage",
    },
    "agentloop.testing": {
        "agentloop.api",
        "agentloop.generation",
        "agentloop.parsers",
        "agentloop.rendering",
        "agentloop.rollout",
    },
    "agentloop.sessions": {
        "agentloop.api",
        "agentloop.chat",
        "agentloop.generation",
        "agentloop.parsers",
        "agentloop.rendering",
        "agentloop.trajectory",
    },
    "agentloop.agents": {"agentloop.api", "agentloop.client", "agentloop.rollout"},
    "agentloop_servers.config.engines": set(),
    "agentloop_servers.config.service": {"agentloop_servers.config.engines"},
    "agentloop_servers.config.models": {"agentloop_servers.config.service", "agentloop_servers.config.engines"},
    "agentloop_servers.http": {"agentloop.api"},
    "agentloop_servers.net.tcp": set(),
    "agentloop_servers.users": {"agentloop.api", "agentloop_servers.config.service", "agentloop_servers.http"},
    "agentloop_servers.run.locks": set(),
    "agentloop_servers.cluster.host": set(),
    "agentloop_servers.metrics": set(),
    "agentloop_servers.net.tls": set(),
    "agentloop_servers.net.certificates": set(),
    "agentloop_servers.private_http": {"agentloop_servers.net.tcp", "agentloop_servers.net.tls"},
    "agentloop_servers.replica": {
        "agentloop.api",
        "agentloop_servers.cluster.host",
        "agentloop_servers.private_http",
    },
    "agentloop_servers.weight_transfer": {
        "agentloop.api",
        "agentloop.client",
        "agentloop_servers.net.tcp",
        "agentloop_servers.net.tls",
    },
    "agentloop_servers.engines.common": {"agentloop.parsers", "agentloop_servers.weight_transfer"},
    "agentloop_servers.engines.vllm": {
        "agentloop.parsers",
        "agentloop_servers.engines.common",
        "agentloop_servers.weight_transfer",
    },
    "agentloop_servers.chat_format": {
        "agentloop.generation",
        "agentloop.parsers",
        "agentloop.rendering",
        "agentloop_servers.config.service",
        "agentloop_servers.engines.vllm",
    },
    "agentloop_servers.coordinator": {
        "agentloop.api",
        "agentloop.fleet",
        "agentloop.scheduling",
        "agentloop.storage",
        "agentloop_servers.cluster.host",
        "agentloop_servers.private_http",
    },
    "agentloop_servers.endpoint": {
        "agentloop.api",
        "agentloop.chat",
        "agentloop.generation",
        "agentloop.parsers",
        "agentloop.rendering",
        "agentloop.sessions",
        "agentloop.storage",
        "agentloop.trajectory",
        "agentloop_servers.http",
        "agentloop_servers.run.locks",
        "agentloop_servers.private_http",
        "agentloop_servers.net.tcp",
    },
    "agentloop_servers.ingress": {
        "agentloop.api",
        "agentloop.chat",
        "agentloop.generation",
        "agentloop.rollout",
        "agentloop_servers.endpoint",
        "agentloop_servers.http",
        "agentloop_servers.metrics",
        "agentloop.storage",
        "agentloop_servers.config.service",
    },
    "agentloop_servers.net.public_port": {"agentloop_servers.net.tcp"},
    "agentloop_servers.processes.serve_process": {"agentloop_servers.config.service", "agentloop_servers.metrics"},
    "agentloop_servers.cluster.nodes": {
        "agentloop_servers.config.service",
        "agentloop_servers.http",
        "agentloop_servers.private_http",
        "agentloop_servers.net.tcp",
        "agentloop_servers.net.tls",
    },
    "agentloop_servers.processes.model_calls": {
        "agentloop.chat",
        "agentloop.rollout",
        "agentloop_servers.endpoint",
    },
    "agentloop_servers.processes.placement": {
        "agentloop.api",
        "agentloop_servers.cluster.nodes",
        "agentloop_servers.config.service",
        "agentloop_servers.config.engines",
    },
    "agentloop_servers.processes.settings": {
        "agentloop.fleet",
        "agentloop.scheduling",
        "agentloop_servers.config.service",
        "agentloop_servers.config.engines",
        "agentloop_servers.cluster.host",
        "agentloop_servers.replica",
    },
    "agentloop_servers.processes.engine_parts": {
        "agentloop.simulation",
        "agentloop_servers.config.service",
        "agentloop_servers.config.engines",
        "agentloop_servers.engines.vllm",
        "agentloop_servers.cluster.host",
        "agentloop_servers.processes.model_calls",
        "agentloop_servers.processes.placement",
    },
    "agentloop_servers.processes.engine_hosts": {
        "agentloop_servers.cluster.nodes",
        "agentloop_servers.config.service",
        "agentloop_servers.config.engines",
        "agentloop_servers.processes.engine_parts",
        "agentloop_servers.engines.vllm",
        "agentloop_servers.cluster.host",
        "agentloop_servers.processes.serve_process",
        "agentloop_servers.net.tcp",
    },
    "agentloop_servers.run.store": {"agentloop.storage", "agentloop_servers.config.service"},
    "agentloop_servers.sinks": {"agentloop.api", "agentloop_servers.config.service"},
    # The wiring: each kind of process, the checks before a start, and the application.
    **{
        f"agentloop_servers.{name}": {"*"}
        for name in (
            "processes.shared",
            "processes.endpoint",
            "processes.coordinator",
            "processes.engine_replica",
            "processes.worker",
            "processes.ingress",
            "processes.checks",
            "app",
        )
    },
    "agentloop_servers.cluster.ray_start": {"agentloop_servers.cluster.host", "agentloop_servers.net.tcp"},
    "agentloop_servers.local": {
        "agentloop_servers.app",
        "agentloop_servers.processes.checks",
        "agentloop_servers.cluster.nodes",
        "agentloop_servers.config.models",
        "agentloop_servers.config.service",
        "agentloop_servers.coordinator",
        "agentloop_servers.cluster.host",
        "agentloop_servers.cluster.ray_start",
        "agentloop_servers.net.tcp",
        "agentloop_servers.run.locks",
    },
    "agentloop_servers.cli": {
        "agentloop.agents",
        "agentloop.api",
        "agentloop.client",
        "agentloop.storage",
        "agentloop.rendering",
        "agentloop.rollout",
        "agentloop.testing",
        "agentloop_servers.chat_format",
        "agentloop_servers.cluster.nodes",
        "agentloop_servers.config.service",
        "agentloop_servers.config.models",
        "agentloop_servers.engines.common",
        "agentloop_servers.cluster.host",
        "agentloop_servers.local",
        "agentloop_servers.run.locks",
        "agentloop_servers.run.store",
    },
}


def modules(sources: dict[str, Path]) -> dict[str, Path]:
    found = {}
    for package, folder in sources.items():
        for file in folder.rglob("*.py"):
            parts = [package, *file.relative_to(folder).with_suffix("").parts]
            found[".".join(part for part in parts if part != "__init__")] = file
    return found


MODULES = modules(SOURCES)
OF_PARTS = modules(PART_SOURCES)
ALL = MODULES | OF_PARTS


@cache
def trees() -> dict[str, ast.Module]:
    return {module: ast.parse(file.read_text()) for module, file in ALL.items()}


def package_of(module: str) -> str:
    """Return the package of a module: its folder below the source root; a module of the root is its own package."""
    parts = module.split(".")
    return ".".join(parts[: 3 if ".".join(parts[:2]) in OF_MODULES else 2])


@cache
def imports(module: str) -> set[str]:
    """Return every module that a file imports at run time, at any position."""
    return imported(trees()[module])


def imported(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_no_wrong_arrow_to_the_outside():
    for module in MODULES:
        source = module.split(".")[0]
        forbidden = set(FORBIDDEN[source])
        if source == "agentloop_servers" and package_of(module) not in MAY_IMPORT_ENGINES:
            forbidden |= ENGINES
        roots = {name.split(".")[0] for name in imports(module)}
        assert not roots & forbidden, module


def test_a_part_imports_the_core_and_no_other_part():
    for module, file in OF_PARTS.items():
        package = module.split(".")[0]
        forbidden = {"examples", "tests", *PART_SOURCES} - {package}
        if file.is_relative_to(ROOT / "tools"):
            forbidden |= {"agentloop_servers", "fastapi", "vllm", "sglang"}
        assert not {name.split(".")[0] for name in imports(module)} & forbidden, module


# Tests of the core that import a part, or the tests of a part, each with its reason.
OF_SEVERAL_PARTS = {
    "benchmarks",  # they also measure the parts
    "clients",  # they run in environments with all parts
    "gpu",
    "parts",
    "servers/test_service_vllm.py",  # a whole service on a real engine: its traces, and slime's calls
    "test_optional_parts.py",
    "test_parts.py",
}


def test_a_test_of_the_core_imports_no_part():
    folder, found = ROOT / "tests", []
    for file in sorted(folder.rglob("*.py")):
        name = str(file.relative_to(folder))
        if name not in OF_SEVERAL_PARTS and name.split("/")[0] not in OF_SEVERAL_PARTS:
            of_parts = [
                one
                for one in imported(ast.parse(file.read_text()))
                if one.split(".")[0] in PART_SOURCES or one.startswith("tests.parts.")
            ]
            found += [f"{name}: {one}" for one in of_parts]
    assert found == []


def test_a_package_imports_what_the_table_allows():
    for module in set(MODULES) - OF_MODULES:
        targets, allowed = _targets(module)
        if allowed.isdisjoint({"*"}):
            assert targets <= allowed, module


def _targets(module: str) -> tuple[set[str], set[str]]:
    """Return the packages that a module imports, and the packages that it may import."""
    package = package_of(module)
    short = package.removeprefix("agentloop.")
    targets = {package_of(name) for name in imports(module) & set(MODULES)} - {package, "agentloop", *OF_MODULES}
    if short in COMMON:
        allowed = {f"agentloop.{name}" for name in COMMON[: COMMON.index(short)]}
    elif package in SOURCES:
        allowed = {"agentloop_servers": set(), "agentloop": set(), **ARROWS}[package] | _common()
    else:
        allowed = ARROWS[package] | _common()
    return targets, allowed


def _common() -> set[str]:
    return {f"agentloop.{name}" for name in COMMON}


def test_the_table_names_what_there_is_and_has_no_cycle():
    there = {package_of(module) for module in MODULES} - {*SOURCES, *OF_MODULES}
    assert there == set(ARROWS) | _common()
    done: set[str] = set()
    for package, allowed in ARROWS.items():
        assert allowed - {"*"} <= done, f"{package} stands below what it imports"
        done.add(package)


def test_no_cycle():
    edges = {module: imports(module) & set(ALL) - {module} for module in ALL}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"import cycle: {' -> '.join((*trail, module))}"
        if module not in done:
            for target in sorted(edges[module]):
                # importing a package's own `__init__` does not import its module
                if not module.startswith(f"{target}."):
                    visit(target, (*trail, module))
            done.add(module)

    for module in edges:
        visit(module, ())


def test_few_modules_are_outside_packages():
    for folder in SOURCES.values():
        assert len([file for file in folder.glob("*.py") if file.name != "__init__.py"]) <= 6, folder


def test_a_function_has_at_most_sixty_lines():
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= 60, f"{module}.{node.name} is {length} lines long"


# Rules that preserve the architecture

# The files in which each pattern is allowed; other files use their functions.
OWNERS: dict[str, set[str]] = {
    r"sqlite3\.connect\(": {"agentloop.storage.sqlite"},
    r"\bWeightVersionSpan\(": {
        "agentloop.types",
        "agentloop.simulation.policy",  # invalid on purpose
        "agentloop.testing.stand_in",  # a policy with a single version
        "agentloop_sglang.convert",  # from the counts at each commit
        "agentloop_servers.engines.vllm.convert",  # from vLLM's labels
    },
    r"\bAsyncRetrying\(": {
        "agentloop.client.transport",  # calls of the service
        "agentloop.fleet.late_replicas",  # a replica that is behind
        "agentloop.rollout.worker",  # the submission of a record
        "agentloop_servers.cli.run",  # the push of a run
    },
    r"\b_?connect\([^)]*\)\.(generate|stream)\(": {
        "agentloop.generation.leased_engine",
        "agentloop_servers.replica.client",  # the coordinator's probe, which belongs to no turn
    },
}

QUESTION = ("What", "Whether", "Who", "How", "Where", "Which", "Whose", "Whoever", "When")
MAX_QUESTIONS = 0
MAX_PRIVATES_IN_TESTS = 10


def test_a_fact_has_one_owner():
    texts = {module: file.read_text() for module, file in ALL.items()}
    found = {pattern: {module for module in texts if re.search(pattern, texts[module])} for pattern in OWNERS}
    assert found == OWNERS


def classes() -> list[tuple[str, ast.ClassDef]]:
    return [
        (module, node)
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]


def test_a_protocol_is_narrow_and_used():
    used = {node.attr for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for module, node in classes():
        if any("Protocol" in ast.unparse(base) for base in node.bases):
            members = {
                part.name if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) else ast.unparse(part.target)
                for part in node.body
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.AnnAssign)
            }
            assert len(members) <= 10, f"{module}.{node.name}"
            assert {name for name in members if not name.startswith("__")} <= used, f"{module}.{node.name}"


def test_no_class_has_the_name_of_another():
    names = [node.name for _, node in classes()]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_a_constant_has_one_value():
    values: dict[str, set[str]] = {}
    for tree in trees().values():
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.BinOp):
                for target in node.targets:
                    if isinstance(target, ast.Name) and target.id.isupper():
                        values.setdefault(target.id, set()).add(ast.unparse(node.value))
    assert {name: found for name, found in values.items() if len(found) > 1} == {}


def test_docstrings_begin_with_a_verb_or_a_noun():
    found = []
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                words = (ast.get_docstring(node) or "-").split(maxsplit=1)
                if words[0] in QUESTION:
                    found.append(f"{module}.{getattr(node, 'name', '')}: {' '.join(words)[:80]}")
    assert len(found) <= MAX_QUESTIONS, found


def test_tests_ask_through_what_is_public():
    found = []
    for file in sorted((ROOT / "tests").rglob("*.py")):
        text = file.read_text()
        for node in ast.walk(ast.parse(text)) if re.search(r"(?<!\bself)(?<!\bcls)\._[a-z]", text) else ():
            if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr):
                owner = ast.unparse(node.value)
                # Names created elsewhere.
                if owner not in ("self", "cls", "super()", "os") and node.attr not in (
                    "_replace",
                    "_asdict",
                    "_request_id",
                ):
                    found.append(f"{file.relative_to(ROOT)}:{node.lineno}: {owner}.{node.attr}")
    assert len(found) <= MAX_PRIVATES_IN_TESTS, found


def test_what_has_a_mark_of_its_own_lane_is_in_a_file_that_the_lane_finds():
    """`make test` passes to those lanes the test files that name the mark, and the engine contract."""
    for file in (ROOT / "tests").rglob("*.py"):
        if re.search(r"pytest\.mark\.(engine|ray)\b", file.read_text()) and file != Path(__file__):
            assert file.name.startswith("test_") or file == ROOT / "tests" / "contract" / "conftest.py", file


# docs/concepts/rollout.md

PAGE = (ROOT / "docs" / "concepts" / "rollout.md").read_text()
WAYS = {"A rollout": 40, "A chat call": 50, "A weight update": 45}  # and the maximum number of files for each


@pytest.mark.parametrize("way", WAYS)
def test_the_three_ways_name_files_that_exist(way):
    section = PAGE.split(f"## {way}\n")[1].split("\n## ")[0]
    steps = re.findall(r"^\d+\. ", section, flags=re.MULTILINE)
    files = set(re.findall(r"`([\w/]+\.py)`", section))
    assert len(steps) == 9
    assert 9 <= len(files) <= WAYS[way]
    for name in files:
        found = [
            root / name
            for root in (ROOT, ROOT / "agentloop", SOURCES["agentloop_servers"], ROOT / "servers", ROOT / "tools")
            if (root / name).is_file()
        ]
        assert len(found) == 1, name


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 900
