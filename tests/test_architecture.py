"""The floor plan: which package may import which, no cycle anywhere, and what a package shows to the others."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {
    "agentloop": ROOT / "agentloop",
    "agentloop_servers": ROOT / "servers" / "agentloop_servers",
    "agentloop_tools": ROOT / "tools" / "agentloop_tools",
}
ENGINES = {"vllm", "sglang", "torch", "transformers"}
FORBIDDEN = {
    "agentloop": {"agentloop_servers", "agentloop_tools", "examples", "tests", "ray", "fastapi", *ENGINES},
    "agentloop_tools": {"agentloop_servers", "examples", "tests", "ray", "fastapi", *ENGINES},
    "agentloop_servers": {"examples", "tests"},
}
MAY_IMPORT_ENGINES = {"agentloop_servers.engines.vllm", "agentloop_servers.weight_transfer"}

# Modules that any package may import; of each other only the earlier ones.
COMMON = (
    "errors",
    "types",
    "codec",
    "clock",
    "logs",
    "plugins",
    "aio",
    "engine",
    "sampled_tokens",
    "engine_lifecycle",
    "checks",
)

# The packages from bottom to top, and which packages each may import beside COMMON.
ARROWS: dict[str, set[str]] = {
    "agentloop.api": set(),
    "agentloop.parsers": set(),
    "agentloop.trajectory": set(),
    "agentloop.simulation": set(),
    "agentloop.client": {"agentloop.api"},
    "agentloop.rendering": {"agentloop.parsers"},
    "agentloop.storage": {"agentloop.api"},
    "agentloop.export": {"agentloop.storage"},
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
    "agentloop_tools": {"agentloop.rollout"},
    "agentloop_servers.config": set(),
    "agentloop_servers.http": {"agentloop.api"},
    "agentloop_servers.private_http": set(),
    "agentloop_servers.replica": {"agentloop.api", "agentloop_servers.private_http"},
    "agentloop_servers.weight_transfer": {"agentloop.api", "agentloop.client"},
    "agentloop_servers.engines": set(),
    "agentloop_servers.engines.vllm": {"agentloop_servers.weight_transfer"},
    "agentloop_servers.coordinator": {
        "agentloop.api",
        "agentloop.fleet",
        "agentloop.scheduling",
        "agentloop.storage",
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
        "agentloop_servers.private_http",
    },
    "agentloop_servers.ingress": {
        "agentloop.api",
        "agentloop.chat",
        "agentloop.generation",
        "agentloop.rollout",
        "agentloop_servers.endpoint",
        "agentloop_servers.http",
    },
    "agentloop_servers.app": {"*"},  # the wiring
    "agentloop_servers.local": {"agentloop_servers.app", "agentloop_servers.config", "agentloop_servers.http"},
    "agentloop_servers.cli": {
        "agentloop.agents",
        "agentloop.api",
        "agentloop.client",
        "agentloop.export",
        "agentloop.storage",
        "agentloop_servers.config",
        "agentloop_servers.local",
    },
}


def modules() -> dict[str, Path]:
    found = {}
    for package, folder in SOURCES.items():
        for file in folder.rglob("*.py"):
            parts = [package, *file.relative_to(folder).with_suffix("").parts]
            found[".".join(part for part in parts if part != "__init__")] = file
    return found


MODULES = modules()


def package_of(module: str) -> str:
    """The package a module belongs to: its folder below the source root; a module of the root is its own."""
    parts = module.split(".")
    if parts[0] == "agentloop_tools":
        return parts[0]
    return ".".join(parts[: 3 if parts[:2] == ["agentloop_servers", "engines"] else 2])


def imports(module: str) -> set[str]:
    """Every module that a file imports at run time, wherever the statement stands."""
    names = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


IMPORTS = {module: imports(module) for module in MODULES}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_no_wrong_arrow_to_the_outside(module):
    source = module.split(".")[0]
    forbidden = set(FORBIDDEN[source])
    if source == "agentloop_servers" and package_of(module) not in MAY_IMPORT_ENGINES:
        forbidden |= ENGINES
    roots = {name.split(".")[0] for name in IMPORTS[module]}
    assert not roots & forbidden


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_package_imports_what_the_table_allows(module):
    package = package_of(module)
    short = package.removeprefix("agentloop.")
    targets = {package_of(name) for name in IMPORTS[module] & set(MODULES)} - {package, "agentloop"}
    if short in COMMON:
        allowed = {f"agentloop.{name}" for name in COMMON[: COMMON.index(short)]}
    elif package in SOURCES:
        allowed = {"agentloop_servers": set(), "agentloop": set(), **ARROWS}[package] | _common()
    else:
        allowed = ARROWS[package] | _common()
    if allowed.isdisjoint({"*"}):
        assert targets <= allowed


def _common() -> set[str]:
    return {f"agentloop.{name}" for name in COMMON}


def test_the_table_names_what_there_is_and_has_no_cycle():
    there = {package_of(module) for module in MODULES} - {"agentloop", "agentloop_servers"}
    assert there == set(ARROWS) | _common()
    done: set[str] = set()
    for package, allowed in ARROWS.items():
        assert allowed - {"*"} <= done, f"{package} stands below what it imports"
        done.add(package)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_only_what_a_package_exports_is_imported_from_outside(module):
    for name in IMPORTS[module] & set(MODULES):
        if package_of(name) != package_of(module):
            assert name in (package_of(name), "agentloop", "agentloop_tools") or _is_exported(name), name


def _is_exported(module: str) -> bool:
    """A module that its package lists in `__all__`."""
    package, _, leaf = module.rpartition(".")
    return package == package_of(module) and f'"{leaf}"' in MODULES[package].read_text()


def test_no_cycle():
    edges = {module: IMPORTS[module] & set(MODULES) - {module} for module in MODULES}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"import cycle: {' -> '.join((*trail, module))}"
        if module not in done:
            for target in sorted(edges[module]):
                if not module.startswith(f"{target}."):  # a package's own `__init__` is no import of its module's
                    visit(target, (*trail, module))
            done.add(module)

    for module in edges:
        visit(module, ())


def test_the_sizes():
    for module, file in MODULES.items():
        text = file.read_text()
        assert text.count("\n") <= 600, f"{module} is longer than 600 lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= 60, f"{module}.{node.name} is {length} lines long"
