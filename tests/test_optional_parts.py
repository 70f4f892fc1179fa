"""The core without its optional parts (`agentloop.parts`).

The files of the optional parts are deleted from a copy. One process then imports all remaining modules, and runs a
service that rolls out a task with its own tool, answers a chat call and receives pushed weights.
"""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agentloop.parts import PARTS

ROOT = Path(__file__).parents[1]
OPTIONAL = tuple(f"{folder}/{part.package}" for part in PARTS for folder in ("servers", "tools"))

PROGRAM = '''
import asyncio, importlib, sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path.cwd()
own = (sys.base_prefix, sys.prefix)  # not the checkout, which an editable install names
sys.path[:] = [str(ROOT), str(ROOT / "servers"), *(path for path in sys.path if path.startswith(own))]

import torch
from aiohttp import ClientSession
from openai import AsyncOpenAI

from agentloop.client.client import RolloutClient
from agentloop.rollout.tool import tool
from agentloop.types import Message, RolloutTask
from tests.support.service.whole_service import simulated_config, whole_service


@tool
async def double(number: int) -> int:
    """Double a number."""
    return 2 * number


async def main() -> None:
    with TemporaryDirectory() as folder:
        engine, tools = {"weight_staging": "host"}, {"double": "__main__:double"}
        config = simulated_config(mode="standalone", engine=engine, workers={"tools": tools})
        async with whole_service(config, Path(folder)) as url, RolloutClient(url) as client:
            asked = (Message("user", "Double 21."),)
            task = RolloutTask("t", asked, tools=("double",))
            records = [record async for record in await client.submit([task])]
            assert [record.is_complete for record in records] == [True], records
            async with client.session() as session, AsyncOpenAI(base_url=session.base_url, api_key="-") as sdk:
                said = [{"role": "user", "content": "hi"}]
                await sdk.chat.completions.create(model="policy", messages=said, max_tokens=16)
            await client.update_weights([("w", torch.zeros(1024))], version=1)
            assert (await client.status()).weight_version == 1
            async with ClientSession(url) as http:
                async with http.post("/pause_generation") as answer:
                    assert (answer.status, "agentloop_contracts" in await answer.text()) == (404, True)
                async with http.post("/generate", json={"input_ids": [1]}) as answer:
                    assert answer.status == 400  # another server's form of the body


for file in sorted([*Path("agentloop").rglob("*.py"), *Path("servers/agentloop_servers").rglob("*.py")]):
    parts = file.relative_to("servers").parts if file.parts[0] == "servers" else file.parts
    name = ".".join(parts)[: -len(".py")].removesuffix(".__init__")
    if "vllm" not in parts and not name.endswith(("__main__", "row_kernels")):  # Triton comes with a GPU's torch
        importlib.import_module(name)
asyncio.run(main())
loaded = [name for name in sys.modules if name.startswith(("agentloop_tools", "agentloop_trainers"))]
print("without", loaded)
'''


def module_of(path: str) -> str:
    return path.removeprefix("servers/").removeprefix("tools/").removesuffix(".py").replace("/", ".")


def test_the_core_imports_no_optional_part():
    optional = tuple(map(module_of, OPTIONAL))
    for file in [*ROOT.glob("agentloop/**/*.py"), *ROOT.glob("servers/agentloop_servers/**/*.py")]:
        name = module_of(str(file.relative_to(ROOT)))
        if name.startswith(optional):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom | ast.Import):
                names = (
                    [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
                )
                assert not any(one.startswith(optional) for one in names), (name, names)


@pytest.mark.slow
def test_a_service_runs_with_their_files_deleted(tmp_path):
    for folder in ("agentloop", "servers", "tools", "tests/support", "examples/tiny_policy"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in OPTIONAL:
        there = tmp_path / path
        if there.is_file():
            there.unlink()
        else:
            shutil.rmtree(there, ignore_errors=True)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["without []"], done.stdout + done.stderr
