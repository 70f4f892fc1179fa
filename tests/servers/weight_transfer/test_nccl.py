"""The parts of the NCCL transport that can be tested without a GPU; the rest is `tests/gpu/push_transports.py`."""

import pytest

from agentloop_servers.weight_transfer.protocol import TransportBroken
from agentloop_servers.weight_transfer.transports.nccl import SHARED_SETTINGS, check_settings, settings


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SHARED_SETTINGS:
        monkeypatch.delenv(name, raising=False)


def test_equal_settings_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    check_settings(settings())
    monkeypatch.setenv("NCCL_PROTO", "Simple")
    assert settings()["NCCL_PROTO"] == "Simple"
    check_settings(settings())


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        ({"NCCL_PROTO": "LL"}, "NCCL_PROTO is Simple in the engine's worker and LL in the sender"),
        ({}, "NCCL_PROTO is Simple in the engine's worker and unset in the sender"),
        ({"NCCL_PROTO": "Simple", "NCCL_ALGO": "ring"}, "NCCL_ALGO is unset in the engine's worker and ring"),
        ({"NCCL_PROTO": "Simple", "NCCL_CUMEM_ENABLE": "0"}, "NCCL_CUMEM_ENABLE is unset .* and 0 in the sender"),
    ],
)
def test_settings_that_would_hang_a_broadcast_are_named(
    theirs: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_PROTO", "Simple")
    with pytest.raises(TransportBroken, match=reason):
        check_settings(theirs)
