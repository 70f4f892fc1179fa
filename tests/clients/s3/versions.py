"""Versions over S3: published, read back, refused. moto serves S3 over HTTP. Runs in a separate environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import s3fs
from moto.server import ThreadedMotoServer

from agentloop.client.publish import PublishOptions
from agentloop.errors import (
    AgentLoopError,
    PointerMissing,
    StoreRefused,
    StoreUnreachable,
    VersionMissing,
    WrongRun,
)
from agentloop_store.local_versions import LocalVersions
from agentloop_store.publisher import VersionPublisher
from agentloop_store.store import VersionStore
from tests.support.versions import RUN, bytes_of, given, held, policy, train

URL = "s3://bucket/policies"
KEYS = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}


def expect(error: type[AgentLoopError], run: str = RUN, version: int | None = None) -> None:
    store = VersionStore(URL, run)
    try:
        print(store.latest() if version is None else store.index(version))
    except error as raised:
        print(f"{type(raised).__name__}: {raised}")
    else:
        raise AssertionError(f"no {error.__name__}")


def main(folder: Path) -> None:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1", **KEYS}
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    os.environ["AWS_SHARED_CREDENTIALS_FILE"] = str(folder / "none")
    s3fs.S3FileSystem().mkdir("bucket")
    expect(PointerMissing)
    weights, rng = policy(), np.random.default_rng(0)
    publisher = VersionPublisher(PublishOptions(URL, RUN, cache=str(folder / "cache"), full_every=4))
    follower = LocalVersions(folder / "host")
    for version in range(6):
        train(weights, rng)
        print(publisher.publish(given(weights), version))
        if version != 2:
            assert held(follower.folder(VersionStore(URL, RUN), version)) == bytes_of(weights)
    late = LocalVersions(folder / "late").folder(VersionStore(URL, RUN), 5)
    assert held(late) == bytes_of(weights)
    expect(WrongRun, "run-2")
    expect(VersionMissing, version=9)
    for name in KEYS:
        del os.environ[name]
    expect(StoreRefused)
    os.environ |= KEYS
    server.stop()
    expect(StoreUnreachable)
    print("all as published")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
