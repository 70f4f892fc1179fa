"""CoreWeave's `cwtrain`: snapshots uploaded to a bucket, and loaded with its hot-load client."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from pathlib import Path

from cwtrain import HotLoader, InferenceClient
from cwtrain.hotload.delta import write_delta
from cwtrain.infra.models import ReplicaState
from cwtrain.integrations import preflight
from verbs import error_of, serve

POLICY = Path(__file__).parents[4] / "examples" / "tiny_policy"


class HotLoads:
    """The calls of a training loop: publish a full snapshot, and later a delta to it."""

    def __init__(self, url: str, _: list[list[int]]) -> None:
        deployment = os.environ[preflight.DEPLOYMENT_ENV]
        client = InferenceClient(base_url=os.environ["COREWEAVE_API_URL"])
        loader = HotLoader(client, deployment, poll_interval=0.2, timeout=120)
        config = loader.deployment.hot_load
        assert config is not None
        loader.s3.create_bucket(Bucket=config.bucket)
        self.loader = loader
        assert preflight.check() == f"s3://{config.bucket}/{config.path_prefix}/"

    def update(self, _: str) -> dict[str, str]:
        """Publish another model, which the replicas refuse, and then v1; check that every replica serves it."""
        loader = self.loader
        with tempfile.TemporaryDirectory() as folder:
            header = json.dumps({"other.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
            data = struct.pack("<Q", len(header)) + header + bytes(8)
            (Path(folder) / "model.safetensors").write_bytes(data)
            (Path(folder) / "config.json").write_text("{}")
            error = error_of(lambda: loader.publish(folder, "other"))["refused"]
        assert error.startswith("HotLoadFailedError"), error
        assert "of the served model are missing in the checkpoint" in error, error
        hot_load = loader.publish(POLICY / "v1", "step_1")
        loader.verify_served(hot_load.id, "step_1")
        assert loader.current_identity() == "step_1"
        return {}

    def killed(self) -> dict[str, str]:
        """Publish a delta to a fleet that has lost a replica: the others serve it."""
        with tempfile.TemporaryDirectory() as folder:
            delta = Path(folder) / "delta"
            write_delta(POLICY / "v1", POLICY / "v0", delta, version="000002", base_version="000001")
            hot_load = self.loader.publish(delta, "step_2", previous_identity="step_1")
        assert hot_load.completed
        replicas = self.loader.client.list_hot_load_replicas(hot_load.id)
        serving = [one for one in replicas if one.state is ReplicaState.READY]
        assert {one.current_snapshot_identity for one in serving} == {"step_2"}
        return {}


serve(HotLoads)
