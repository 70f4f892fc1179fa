"""The arrows of the design: who may import whom, inside functions too, and no cycle anywhere."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
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
MAY_IMPORT_ENGINES = {"agentloop_servers.engines", "agentloop_servers.transfer"}


def modules() -> dict[str, Path]:
    found = {}
    for package, folder in PACKAGES.items():
        for file in folder.rglob("*.py"):
            parts = [package, *file.relative_to(folder).with_suffix("").parts]
            found[".".join(part for part in parts if part != "__init__")] = file
    return found


MODULES = modules()


def imports(file: Path, module: str) -> set[str]:
    """Every module that a file imports at run time, wherever the statement stands."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("module", sorted(MODULES))
def test_no_wrong_arrow(module):
    package = module.split(".")[0]
    forbidden = set(FORBIDDEN[package])
    if package == "agentloop_servers" and not any(module.startswith(name) for name in MAY_IMPORT_ENGINES):
        forbidden |= ENGINES
    roots = {name.split(".")[0] for name in imports(MODULES[module], module)}
    assert not roots & forbidden


def test_no_cycle():
    edges = {module: imports(file, module) & set(MODULES) - {module} for module, file in MODULES.items()}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"import cycle: {' -> '.join((*trail, module))}"
        if module not in done:
            for target in sorted(edges[module]):
                visit(target, (*trail, module))
            done.add(module)

    for module in edges:
        visit(module, ())


def test_the_sizes_we_aim_at():
    for module, file in MODULES.items():
        text = file.read_text()
        assert text.count("\n") <= 400, f"{module} is longer than 400 lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= 60, f"{module}.{node.name} is {length} lines long"
