"""Contents of an install: our import packages, and nothing that shadows a user's own folders."""

import ast
import itertools
import os
import re
import subprocess
import sys
import textwrap
import tomllib
import zipfile
from pathlib import Path

import pytest

from agentloop.parts import GROUP_PREFIX, PARTS
from agentloop.plugins import DISTRIBUTION, install_hint
from agentloop_servers.engines.common.versions import DRIVEN, objection

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    return zipfile.ZipFile(next(out.glob("*.whl")))


def test_the_wheel_holds_our_packages_and_no_generic_name(wheel):
    top_level = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {
        "agentloop",
        "agentloop_servers",
        *(part.package for part in PARTS),
    }
    assert sum(name.endswith("py.typed") for name in wheel.namelist()) == 2 + len(PARTS)


INSTALLED = """
import importlib.metadata, importlib.util, os, sys
site, own = sys.argv[1], (sys.base_prefix, sys.prefix)
sys.path[:] = [site, *(path for path in sys.path if path.startswith(own))]
from agentloop import parts
ours, parts.PARTS = parts.PARTS, ()  # read the metadata alone
for part in ours:
    assert importlib.util.find_spec(part.package).origin.startswith(site), part.package
    for group, entries in part.entries.items():
        for name in entries:
            assert parts.load(group, name, param="name") is not None
[script] = [one for one in importlib.metadata.entry_points(group="console_scripts") if one.name == "agentloop"]
sys.argv = ["agentloop", "--help"]
script.load()()
"""


@pytest.mark.slow
def test_a_wheel_that_is_installed_has_the_command_and_every_part(wheel, tmp_path):
    wheel.extractall(tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", INSTALLED, str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert {"serve", "view", "check-logprobs"} <= set(done.stdout.split())


def test_the_entry_points_are_those_of_the_table():
    named: dict[str, dict[str, str]] = {"verl.plugins": {"agentloop": "agentloop_trainers.verl"}}
    for part in PARTS:
        for group, entries in part.entries.items():
            named.setdefault(GROUP_PREFIX + group, {}).update(entries)
    assert PROJECT["entry-points"] == named


def test_the_lock_pins_everything_exactly_and_names_no_local_version():
    for lane in ("cpu", "vllm", "sglang", "sglang-cpu", "dev"):
        pins = (ROOT / "requirements" / f"{lane}.txt").read_text().split()
        assert pins, lane
        assert all(pin.count("==") == 1 and "+" not in pin and "@" not in pin for pin in pins), lane
    cpu = (ROOT / "requirements" / "cpu.txt").read_text()
    assert "torch==2.13.0\n" in cpu
    assert not any(name in cpu for name in ("torchvision", "torchaudio", "torchcodec", "nvidia"))
    sglang = (ROOT / "requirements" / "sglang-cpu.txt").read_text()
    assert "torch==2.13.0\n" in sglang
    assert not any(
        name in sglang for name in ("torchaudio", "torchcodec", "nvidia-c", "flashinfer", "sglang-kernel")
    )


def test_the_engines_are_extras():
    for engine in DRIVEN:
        [pin] = [one for one in EXTRAS[engine] if one.startswith(f"{engine}==")]
        assert not objection(engine, pin.partition("==")[2])
    assert set(EXTRAS) == {
        "serve",
        "environments",
        "export",
        "cpu",
        "vllm",
        "sglang",
        "tensorboard",
        "wandb",
        "renderers",
        "replay",
        "mcp",
        "models",
        "postgres",
        "otel",
        "trl",
        "store",
    }
    assert not any("vllm" in one or "sglang" in one or "torch" in one for one in PROJECT["dependencies"])


def test_the_base_install_is_the_client_and_its_values():
    names = {re.split(r"[\[<>=]", one)[0] for one in PROJECT["dependencies"]}
    client = {"aiohttp", "msgspec", "numpy", "openai", "orjson", "pydantic", "structlog", "tenacity"}
    command = {"pyyaml", "rich", "typer"}  # the commands that talk to a running service
    assert names == client | command | {"jinja2", "tokenizers", "xxhash"}  # loops, tools and rewards need these
    assert not any("==" in one for one in PROJECT["dependencies"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "is_light"),
    [
        ("from agentloop.client import RolloutClient, load_tasks", True),
        ("from agentloop.rollout import LoopContext, Tool, ToolSession, ToolSpec, exact_match, tool", False),
        ("from agentloop_servers.cli import remote, rollout, records, top, bench, commands", False),
    ],
)
def test_client_and_user_code_import_nothing_but_the_base_install(statement, is_light):
    """In a process that refuses every other package, like an environment without it."""
    code = f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'servers')]}; " + textwrap.dedent(
        f"""
        import importlib.abc
        class Absent(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {sorted(_serve_only())}:
                    raise ModuleNotFoundError(name, name=name)
        sys.meta_path.insert(0, Absent())
        {statement}
        from agentloop.types import Message
        print(sorted({{name.partition(".")[0] for name in sys.modules}}))
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    heavy = {"ray", "fastapi", "torch"} | ({"tokenizers"} if is_light else set())
    assert not heavy & set(ast.literal_eval(done.stdout))


@pytest.mark.slow
def test_the_command_says_what_it_lacks_without_the_service():
    code = "import sys; sys.modules['ray'] = None; sys.argv = ['agentloop', 'serve']; "
    code += "from agentloop_servers.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "servers", ROOT / "tools")))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert done.returncode == 1
    assert done.stderr.strip().splitlines() == [f"agentloop: ray is not installed: {install_hint('serve')}"]


HINTED = {".py", ".md", ".toml", ".yaml", ".sh", ".in", ""}


def test_every_installation_hint_works_in_a_checkout_and_names_no_package_of_the_index():
    """The index has no `agentloop-rollouts` yet, and its `agentloop` belongs to another author."""
    assert PROJECT["name"] == DISTRIBUTION != "agentloop"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    num_hints = 0
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix not in HINTED or path == Path(__file__) or not path.is_file():
            continue
        for paragraph in re.split(r"\n\s*\n", path.read_text()):
            assert not re.search(r"(?<![\w-])agentloop\[\w", paragraph), f"{name}: {paragraph}"
            assert not re.search(r"pip install (?:-\S+ )*['\"]?agentloop(?![\w-])", paragraph), (
                f"{name}: {paragraph}"
            )
            assert not re.search(rf"pip install (?:-\S+ )*['\"]?{DISTRIBUTION}", paragraph), f"{name}: {paragraph}"
            for extra in re.findall(r"pip install (?:-e )?'\.\[([\w,]+)\]'", paragraph):
                num_hints += 1
                assert set(extra.split(",")) <= set(EXTRAS), name
    assert num_hints >= 4
    assert all(extra in EXTRAS for extra in ("serve", "renderers"))  # the code's own hints name these
    assert install_hint("serve") == "in a checkout of agentloop: pip install -e '.[serve]'"


def test_every_table_row_of_a_page_belongs_to_a_table():
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        lines = ["", *page.read_text().splitlines()]
        for above, line, below in zip(lines, lines[1:], [*lines[2:], ""], strict=False):
            begins = line.startswith("|") and not above.startswith("|")
            assert not begins or re.fullmatch(r"\|[-:| ]+\|", below), f"{page.name}: {line}"


def test_the_index_has_each_page_and_each_link_leads_somewhere():
    docs, link = ROOT / "docs", re.compile(r"\]\(([^)\s#]+)(?:#[^)]*)?\)")
    index = (docs / "README.md").read_text()
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")} - {"README.md"}
    assert pages == set(link.findall(index)) - {"../README.md", "../CHANGELOG.md"}
    assert pages == set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)) - {"README.md"}
    assert "docs/README.md" in link.findall((ROOT / "README.md").read_text())
    for page in (ROOT / "README.md", ROOT / "CHANGELOG.md", *docs.rglob("*.md")):
        for target in link.findall(page.read_text()):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"
    measured = "its span's version |", "all v0 |"  # only in logprobs.md
    assert not any(row in (docs / "guides" / "learning.md").read_text() for row in measured)
    assert (ROOT / "LICENSE").read_text().split()[:4] == ["Apache", "License", "Version", "2.0,"]


def test_every_page_that_a_file_names_exists():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.split():
        if name.endswith((".py", ".md", ".yaml", ".toml")) or name == "Makefile":
            for page in re.findall(r"\bdocs/[\w/-]+\.md", (ROOT / name).read_text()):
                assert (ROOT / page).is_file(), f"{name}: {page}"


def test_every_path_in_the_contributing_page_exists():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = re.findall(r"`((?:agentloop|servers|tools|tests|examples)/[\w/.-]+)", text)
    assert len(paths) >= 30
    assert [path for path in paths if not (ROOT / path).exists()] == []
    targets = re.findall(r"^(test[\w-]*|check|docs|house):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"`make ([\w-]+)", text)) <= set(targets)


PIP_SAYS = """Collecting aiohttp==3.12 (from -r lock (line 1))
  Downloading aiohttp-3.12-cp311.whl (1.7 MB)
Requirement already satisfied: rich==15.0.0 in ./lib (from -r lock (line 2)) (15.0.0)
Collecting torch==2.13.0
  Using cached torch-2.13.0-cp311.whl (190.1 MB)
Installing collected packages: aiohttp, torch"""


@pytest.mark.parametrize("status", [0, 3])
def test_the_installation_shows_what_it_is_at_and_fails_as_pip_does(tmp_path, status):
    """With a stand-in for pip that prints pip's messages."""
    (tmp_path / "lock").write_text("aiohttp==3.12\nrich==15.0.0\ntorch==2.13.0\n")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncat <<'END'\n{PIP_SAYS}\nEND\nexit {status}\n")
    python.chmod(0o755)
    command = [str(ROOT / "requirements" / "install.sh"), str(python), str(tmp_path / "lock")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status
    assert [line.split() for line in done.stdout.splitlines()][:5] == [
        ["1", "of", "3", "aiohttp==3.12"],
        ["1.7", "MB"],
        ["2", "of", "3", "rich==15.0.0"],
        ["3", "of", "3", "torch==2.13.0"],
        ["190.1", "MB"],
    ]
    assert "requirements/install.sh $(BIN)/python requirements/cpu.txt" in (ROOT / "Makefile").read_text()


def test_everything_imported_is_declared():
    declared = {
        re.split(r"[\[<>=]", one)[0] for one in (*PROJECT["dependencies"], *itertools.chain(*EXTRAS.values()))
    } | {
        *BROUGHT_BY_TRAINERS,
        "vllm",
        "transformers",
        "xgrammar",
        "triton",
        "httpx2",
    }  # engines install these, mcp the last one
    for file in (*ROOT.glob("agentloop/**/*.py"), *ROOT.glob("servers/**/*.py"), *ROOT.glob("tools/**/*.py")):
        for name in _imported(file) - set(sys.stdlib_module_names):
            if not name.startswith("agentloop"):
                assert DISTRIBUTIONS.get(name, name.replace("_", "-")) in declared, f"{file}: {name}"


DISTRIBUTIONS = {"yaml": "pyyaml", "zmq": "pyzmq", "ray": "ray", "opentelemetry": "opentelemetry-sdk"}
# users of verl have verl installed, so it is not one of our extras
BROUGHT_BY_TRAINERS = {"datasets", "verl", "transfer-queue"}
BROUGHT_ALONG = {"pydantic_core", "yarl", "aiohappyeyeballs"}  # installed by pydantic and by aiohttp


def _imported(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


def _serve_only() -> set[str]:
    """Import names of packages that only the extras install."""
    names = {re.split(r"[\[<>=]", one)[0] for one in itertools.chain(*EXTRAS.values())} - {DISTRIBUTION}
    modules = {distribution: module for module, distribution in DISTRIBUTIONS.items()}
    names -= {re.split(r"[\[<>=]", one)[0] for one in PROJECT["dependencies"]}
    return {modules.get(name, name.replace("-", "_")) for name in names} - BROUGHT_ALONG
