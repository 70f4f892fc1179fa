"""The supported engine versions; others are refused before anything loads."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import structlog

from agentloop.errors import EngineError
from agentloop_servers.engines.common.versions import DRIVEN, objection, require_driven
from agentloop_servers.engines.vllm.config import VllmConfig
from agentloop_servers.engines.vllm.process import VllmProcess


@pytest.mark.parametrize(
    ("engine", "version", "is_driven"),
    [
        ("vllm", "0.32.0", True),
        ("vllm", "0.33.1+cu130", True),
        ("vllm", "0.33.0.dev3+g1a2b3c", True),
        ("vllm", "0.31.2", False),
        ("vllm", "0.34.0", False),
        ("vllm", "0.330.0", False),
        ("vllm", "dev", False),
        ("vllm", "", False),
        ("sglang", "0.5.17", True),
        ("sglang", "0.5.17.post1", True),
        ("sglang", "0.5.23+cu13", True),
        ("sglang", "0.5.18", False),
        ("sglang", "0.5.2", False),
        ("sglang", "0.5.230", False),
        ("sglang", "0.0.0.dev0", False),
    ],
)
def test_versions_by_release(engine: str, version: str, is_driven: bool) -> None:
    assert (objection(engine, version) == "") == is_driven


def test_docs_and_overrides_name_the_range() -> None:
    root = Path(__file__).parents[4]
    head = next(
        line for line in (root / "docs/guides/engines.md").read_text().splitlines() if line.startswith("| | vLLM")
    )
    newest = (root / "requirements/overrides-newest.txt").read_text().splitlines()
    for engine, releases in DRIVEN.items():
        assert f"{engine} {', '.join(releases)}".lower() in head.lower()
        [pin] = [line for line in newest if line.startswith(f"{engine}==")]
        assert pin.partition("==")[2].startswith(releases[-1])


def vllm_process(**options: bool) -> VllmProcess:
    return VllmProcess(VllmConfig("/none", 0, device="cuda", **options))


VLLM = r"the adapter is tested with 0\.32 and 0\.33"
HINT = "; to start it anyway, set `allow_untested: true` in `engine`$"


@pytest.mark.parametrize(
    ("version", "process", "message"),
    [
        ("0.1.9", vllm_process(allow_untested=True), rf"^vllm 0\.1\.9: {VLLM}$"),
        ("0.34.0rc1", vllm_process(), rf"^vllm 0\.34\.0rc1: {VLLM}{HINT}"),
        ("dev", vllm_process(allow_untested=True), f"^vllm dev: {VLLM}$"),
    ],
)
async def test_a_start_refuses_other_versions_by_name(
    monkeypatch: pytest.MonkeyPatch, version: str, process: VllmProcess, message: str
) -> None:
    install(monkeypatch, "vllm", version)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # a start fills it
    with pytest.raises(EngineError, match=message):
        await process.start()
    await process.close()


@pytest.mark.parametrize(("version", "num_warnings"), [("0.33.1", 0), ("0.34.0", 1)])
def test_an_untested_newer_version_is_allowed_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, version: str, num_warnings: int
) -> None:
    install(monkeypatch, "vllm", version)
    with structlog.testing.capture_logs() as logged:
        require_driven("vllm", allow_untested=True)
    assert [(one["event"], one["log_level"]) for one in logged] == [("engine_untested", "warning")] * num_warnings


def install(monkeypatch: pytest.MonkeyPatch, engine: str, version: str) -> None:
    package = ModuleType(engine)
    package.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, engine, package)
