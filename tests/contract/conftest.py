"""One `engine_case` an engine, started once a session.

`tests/contract/vllm_case.py` holds `async start_vllm_case() -> EngineCase` and `async stop_vllm_case(case)`. It is
imported only where the vLLM case runs: the rest of the suite needs no engine installed.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contract.cases import EngineCase
from tests.contract.driving import is_idle, until
from tests.contract.simulated_case import start_simulated_case


@pytest.fixture(scope="session", params=["simulated", pytest.param("vllm", marks=pytest.mark.engine)])
async def engine_case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EngineCase]:
    if request.param == "simulated":
        case = await start_simulated_case(Path(tmp_path_factory.mktemp("checkpoints")))
        yield case
        await case.engine.close()
        return
    vllm_case = importlib.import_module("tests.contract.vllm_case")
    case = await vllm_case.start_vllm_case()
    yield case
    await vllm_case.stop_vllm_case(case)


@pytest.fixture
async def case(engine_case: EngineCase) -> AsyncIterator[EngineCase]:
    """The engine, idle and serving; after the test it has to become so again."""
    assert engine_case.engine.is_usable
    assert not engine_case.engine.is_paused
    yield engine_case
    if engine_case.engine.asleep:
        await engine_case.engine.wake()
    await engine_case.engine.resume()
    await until(lambda: is_idle(engine_case.engine))
