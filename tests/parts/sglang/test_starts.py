"""The configuration of an SGLang replica, and the steps of its start before SGLang is imported."""

from __future__ import annotations

import os
import re

import pytest

from agentloop.errors import EngineError
from agentloop_servers.processes.engine_parts import process_fields
from agentloop_servers.weight_transfer.transports.nccl import SHARED_SETTINGS, check_settings, settings
from agentloop_sglang.config import SglangConfig, prepare_environment
from agentloop_sglang.kind import config_of
from agentloop_sglang.process import SglangProcess
from tests.servers.engines.common.test_versions import install
from tests.support.service.whole_service import simulated_config
from tests.support.transfer.adapters import POLICY


def test_a_replica_has_the_settings_of_its_entry() -> None:
    given = {"kind": "sglang", "device": "cuda", "kv_cache_dtype": "fp8", "block_size": 16}
    own = {"settings": {"attention_backend": "fa3"}}
    config = simulated_config(mode="hybrid", engine={**given, "scheduling_policy": "priority", **own})
    [entry] = config.entries
    _, settings = entry.registered()
    replica = config_of(process_fields(config, entry), **settings)
    assert (replica.block_size, replica.scheduling_policy) == (16, "priority")
    assert (replica.attention_backend, replica.kv_cache_dtype) == ("fa3", "fp8")
    assert (replica.weight_staging, replica.can_sleep) == ("none", True)  # hybrid: a GPU shared with the trainer


@pytest.mark.parametrize(
    ("version", "is_allowed", "hint"),
    [("0.1.9", True, "$"), ("0.5.20", False, "; to start it anyway, set `allow_untested: true` in `engine`$")],
)
async def test_a_start_refuses_other_versions_by_name(
    monkeypatch: pytest.MonkeyPatch, version: str, is_allowed: bool, hint: str
) -> None:
    install(monkeypatch, "sglang", version)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # a start fills it
    process = SglangProcess(SglangConfig("/none", 0, allow_untested=is_allowed))
    tested = r"the adapter is tested with 0\.5\.17 and 0\.5\.23"
    with pytest.raises(EngineError, match=f"^sglang {re.escape(version)}: {tested}{hint}"):
        await process.start()
    await process.close()


def test_sglang_is_joined_by_a_trainer_whose_environment_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SHARED_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    theirs = settings()
    monkeypatch.setattr(os, "environ", dict(os.environ))
    prepare_environment(SglangConfig(str(POLICY / "v0"), 0))
    assert os.environ["NCCL_CUMEM_ENABLE"]  # SGLang sets it if it is unset
    check_settings(theirs)
