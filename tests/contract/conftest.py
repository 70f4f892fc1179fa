"""One `engine_case` per engine, started once per session.

`tests/contract/vllm_case.py` defines `async start_vllm_case() -> EngineCase` and `async stop_vllm_case(case)`;
`tests/parts/sglang/sglang_case.py` does the same for SGLang. Each is imported only where its case runs: an engine
that is not installed is skipped.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator
from importlib.util import find_spec

import pytest

from tests.contract.cases import EngineCase
from tests.contract.driving import is_idle, until
from tests.contract.simulated_case import start_simulated_case

REAL = [pytest.param(name, marks=pytest.mark.engine) for name in ("vllm", "speculative", "sglang")]
"""`speculative` is vLLM with drafts."""


SHORT_WITH_DRAFTS = "test_logprobs_contract.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Reserve tests that drafts rarely affect for `make test-long`."""
    for item in items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if params.get("engine_case") == "speculative" and item.path.name != SHORT_WITH_DRAFTS:
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="module", params=["simulated", pytest.param("vllm", marks=pytest.mark.engine)])
async def adapter_case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EngineCase]:
    """An engine that serves adapters by name."""
    folder = tmp_path_factory.mktemp("adapters")
    if request.param == "simulated":
        case = await start_simulated_case(folder, max_loras=2)
    else:
        case = await importlib.import_module("tests.contract.vllm_case").start_adapters_case(folder)
    yield case
    await case.engine.close()


@pytest.fixture(scope="session", params=["simulated", *REAL])
async def engine_case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EngineCase]:
    name = request.param
    if name == "simulated":
        case = await start_simulated_case(tmp_path_factory.mktemp("checkpoints"))
        yield case
        await case.engine.close()
        return
    engine = "sglang" if name == "sglang" else "vllm"
    if find_spec(engine) is None:
        pytest.skip(f"needs {engine} (`make test-{engine}`, or a GPU)")
    where = "tests.parts.sglang" if engine == "sglang" else "tests.contract"
    module = importlib.import_module(f"{where}.{engine}_case")
    case = await getattr(module, f"start_{name}_case")()
    yield case
    await getattr(module, f"stop_{engine}_case")(case)


@pytest.fixture
async def case(engine_case: EngineCase) -> AsyncIterator[EngineCase]:
    """The engine, idle and serving; after the test it must become idle and serving again."""
    assert engine_case.engine.is_usable
    assert not engine_case.engine.is_paused
    yield engine_case
    if engine_case.engine.asleep:
        await engine_case.engine.wake()
    await engine_case.engine.resume()
    await until(lambda: is_idle(engine_case.engine))
