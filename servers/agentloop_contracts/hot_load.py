"""The hot-load API of CoreWeave's RL Rollouts, for its client `cwtrain` 1.0.2, and the ledger of weight versions.

The API is a preview, so this file contains all of it. The service is one deployment, whose id is the run of the
config's `weights`; its bucket and prefix are the store. A hot load is an update job of the coordinator
(`agentloop/api/coordinator.py`): each host downloads and verifies the snapshot while it decodes. Enums and errors
are those of protobuf's JSON. `docs/guides/hot-load.md` lists the differences.
"""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, Path, Query
from pydantic import Field, model_validator
from starlette.responses import Response

from agentloop.api.coordinator import (
    FrontPort,
    JobState,
    ReplicaStatus,
    ServiceStatus,
    UpdateJob,
    UpdateProgress,
    UpdateReport,
)
from agentloop.api.requests import Body
from agentloop.chat.fields import Ignored
from agentloop.engine.interface import PublishedSource
from agentloop.errors import AgentLoopError, Conflict, InvalidRequest, NotFound
from agentloop.types import KVPolicy
from agentloop_servers.endpoint.endpoint import Endpoint
from agentloop_servers.http.auth import Keys
from agentloop_servers.http.guard import json_body, speaks
from agentloop_servers.http.openapi import OBJECT, add_route, errors
from agentloop_servers.http.responses import json_response
from agentloop_servers.ingress.admin import AdminRoutes

HOT_LOAD_PREFIX = "/v1alpha1/inference"
INITIAL = "initial"
"""The API's name of the weights that engines load at their start."""

_STATES = {
    JobState.PENDING: "HOT_LOAD_STATE_PENDING",
    JobState.RUNNING: "HOT_LOAD_STATE_IN_PROGRESS",
    JobState.COMPLETED: "HOT_LOAD_STATE_COMPLETED",
    JobState.FAILED: "HOT_LOAD_STATE_FAILED",
    JobState.CANCELLED: "HOT_LOAD_STATE_CANCELED",
}
CachePolicy = Literal[
    "PROMPT_CACHE_POLICY_UNSPECIFIED", "PROMPT_CACHE_POLICY_PRESERVE", "PROMPT_CACHE_POLICY_RESET_ALL"
]
_POLICIES: dict[CachePolicy, KVPolicy | None] = {
    "PROMPT_CACHE_POLICY_UNSPECIFIED": None,
    "PROMPT_CACHE_POLICY_PRESERVE": KVPolicy.KEEP,
    "PROMPT_CACHE_POLICY_RESET_ALL": KVPolicy.RECOMPUTE,
}
_POLICY_NAMES = {policy: name for name, policy in _POLICIES.items()}
_NO_UPDATE = UpdateProgress(0, "", 0)
_CODES = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND"}
_CODES |= {409: "FAILED_PRECONDITION", 429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE"}

Identity = Annotated[str, Field(pattern=r"^[^/\x00-\x1f\x7f]{1,128}$")]
NewId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
JobId = Annotated[str, Path(max_length=135)]
PageSize = Annotated[int, Query(alias="maxPageSize", ge=1, le=1000)]
PageToken = Annotated[str, Query(alias="pageToken", max_length=128)]
DeploymentId = Annotated[str, Query(alias="parentDeploymentId", max_length=128)]
LedgerVersion = Annotated[int | None, Query(ge=0)]


class HotLoadExists(Conflict):
    """The client-chosen id of a hot load is in use."""

    code = "already_exists"


class DeltaBody(Body):
    """`incrementalSnapshotMetadata`: the snapshot that a delta was made for."""

    base: Identity = Field(alias="previousSnapshotIdentity")
    compression: Annotated[Literal["COMPRESSION_FORMAT_ZSTD"], Field(alias="compressionFormat")] = (
        "COMPRESSION_FORMAT_ZSTD"
    )
    checksum: Annotated[Literal["CHECKSUM_FORMAT_ADLER32"], Field(alias="checksumFormat")] = (
        "CHECKSUM_FORMAT_ADLER32"
    )


class HotLoadBody(Body):
    """The body of `POST /v1alpha1/inference/hotLoads`."""

    deployment_id: Annotated[str, Field(alias="deploymentId")]
    hot_load_id: NewId | None = Field(None, alias="hotLoadId")
    identity: Identity
    type: Literal["SNAPSHOT_TYPE_FULL", "SNAPSHOT_TYPE_INCREMENTAL"]
    delta: DeltaBody | None = Field(None, alias="incrementalSnapshotMetadata")
    policy: Annotated[CachePolicy, Field(alias="promptCachePolicy")] = "PROMPT_CACHE_POLICY_UNSPECIFIED"

    @model_validator(mode="after")
    def _is_consistent(self) -> HotLoadBody:
        if self.identity in (".", "..", INITIAL):
            raise InvalidRequest(f"the snapshot name {self.identity!r} is reserved", param="identity")
        if (self.type == "SNAPSHOT_TYPE_INCREMENTAL") != (self.delta is not None):
            raise InvalidRequest(
                "a snapshot with `incrementalSnapshotMetadata`, and no other, must be incremental", param="type"
            )
        if self.delta is not None and self.delta.base == self.identity:
            raise InvalidRequest("the base must be another snapshot", param="previousSnapshotIdentity")
        return self


class CancelBody(Body):
    """The body of `POST /v1alpha1/inference/hotLoads/{id}:cancel`."""

    id: Ignored = None


HotLoadRequest = Annotated[HotLoadBody, Depends(json_body(HotLoadBody))]
CancelRequest = Annotated[CancelBody, Depends(json_body(CancelBody))]


class HotLoadRoutes:
    """The hot-load API, and `GET /weights/ledger`. All routes require the admin key."""

    def __init__(self, coordinator: FrontPort, admin: AdminRoutes, endpoint: Endpoint) -> None:
        self._coordinator = coordinator
        self._admin = admin
        self._endpoint = endpoint

    def router(self, keys: Keys) -> APIRouter:
        """Return the routes. Errors of the hot-load API have its own format."""
        combined = APIRouter(responses={**errors(), **OBJECT}, tags=["hot load"])
        admin = Depends(keys.require_admin)
        api = APIRouter(prefix=HOT_LOAD_PREFIX, dependencies=[Depends(speaks(_error)), admin])
        ledger = APIRouter(dependencies=[admin])
        add_route(api, "GET", "/deployments/{deployment_id}", self.deployment)
        add_route(api, "POST", "/hotLoads", self.create, HotLoadBody)
        add_route(api, "GET", "/hotLoads", self.hot_loads)
        add_route(api, "GET", "/hotLoads/{hot_load_id}", self.hot_load)
        # `{id}:cancel`, which is one segment of a path.
        add_route(api, "POST", "/hotLoads/{hot_load_id}", self.cancel, CancelBody)
        add_route(api, "GET", "/hotLoads/{hot_load_id}/replicas", self.replicas)
        add_route(ledger, "GET", "/weights/ledger", self.ledger)
        combined.include_router(api)
        combined.include_router(ledger)
        return combined

    async def deployment(self, deployment_id: JobId) -> Response:
        """Return the service as the only deployment: its state, and the bucket and prefix of its snapshots."""
        source, _ = await self._jobs(deployment_id)
        status = await self._admin.status()
        # Without weights yet, the service accepts a hot load and no calls.
        is_ready = status.is_ready or (bool(status.replicas) and status.weight_version is None)
        url = urlsplit(source.store)
        folder = url.path.strip("/") if url.netloc else ""
        store = {
            "bucket": url.netloc or source.store,
            "pathPrefix": f"{folder}/{source.run}".lstrip("/"),
            "transitionMode": "TRANSITION_MODE_ASYNC",
        }
        model = {"name": self._endpoint.model_name}
        spec = {"id": source.run, "name": source.run, "model": model, "gatewayIds": [], "hotLoad": store}
        state = {"status": "STATUS_READY" if is_ready else "STATUS_UPDATING"}
        return json_response({"deployment": {"spec": spec, "status": state}})

    async def create(self, body: HotLoadRequest) -> Response:
        """Start a hot load of a snapshot that was uploaded to the store."""
        source, jobs = await self._jobs(body.deployment_id)
        if any(job.job_id == body.hot_load_id for job in jobs):
            raise HotLoadExists(f"hot load {body.hot_load_id} exists: read it with GET", param="hotLoadId")
        base, policy = "" if body.delta is None else body.delta.base, _POLICIES[body.policy]
        wanted = UpdateJob(body.hot_load_id or str(uuid.uuid4()), body.identity, base, policy)
        return json_response({"hotLoad": _hot_load(await self._admin.begin_update(wanted), source)})

    async def hot_loads(
        self, deployment_id: DeploymentId = "", page_size: PageSize = 100, token: PageToken = ""
    ) -> Response:
        """List hot loads, the newest first. A page's token is the id of its last hot load."""
        source, jobs = await self._jobs(deployment_id)
        newest = jobs[::-1]
        start = next((at for at, job in enumerate(newest, 1) if job.job_id == token), None) if token else 0
        if start is None:
            raise InvalidRequest(f"unknown page token {token!r}: begin with the first page", param="pageToken")
        page = newest[start : start + page_size]
        is_last = start + page_size >= len(newest)
        shown = [_hot_load(job, source) for job in page]
        return json_response({"hotLoads": shown, "nextPageToken": "" if is_last else page[-1].job_id})

    async def hot_load(self, hot_load_id: JobId) -> Response:
        """Return a hot load's state."""
        source, jobs = await self._jobs()
        return json_response({"hotLoad": _hot_load(_job(jobs, hot_load_id), source)})

    async def replicas(self, hot_load_id: JobId) -> Response:
        """Return the current state of every replica, in a single page."""
        _, jobs = await self._jobs()
        job, status = _job(jobs, hot_load_id), await self._admin.status()
        report = next((one for one in reversed(status.updates) if one.version == job.version), None)
        shown = [_replica(one, job, jobs, status, report) for one in status.replicas]
        shown.sort(key=lambda one: (one["zone"], one["name"]))
        if job.state is JobState.FAILED and shown:
            # All replicas keep their weights. The client prints every row's reason, so one row has it.
            shown = [{**one, "state": "ERROR"} for one in shown]
            shown[0]["errorReason"] = job.error
        return json_response({"replicas": shown, "nextPageToken": ""})

    async def cancel(self, hot_load_id: JobId, body: CancelRequest) -> Response:
        """Cancel a hot load whose replicas have not begun to swap. The path ends with its id and `:cancel`."""
        source, jobs = await self._jobs()
        job_id, _, verb = hot_load_id.rpartition(":")
        if verb != "cancel":
            raise NotFound(f"unknown path {hot_load_id!r}: expected {hot_load_id}:cancel", param="hotLoadId")
        job = await self._admin.ask(self._coordinator.cancel_update(_job(jobs, job_id).job_id))
        return json_response({"hotLoad": _hot_load(job, source)})

    async def ledger(self, version: LedgerVersion = None) -> Response:
        """Return the latest weight updates, one row per version and replica: when it had loaded the version, and
        how long it paused."""
        jobs, status = (await self._admin.ask(self._coordinator.update_jobs())).jobs, await self._admin.status()
        reports = [one for one in status.updates if not one.adapter]
        if version is not None and all(one.version != version for one in reports):
            known = ", ".join(str(one.version) for one in reports[-8:]) or "none"
            raise NotFound(f"unknown version {version}: the ledger's latest versions are {known}", param="version")
        rows = [
            {
                "version": report.version,
                "snapshot": _identity(report.version, jobs, status),
                "replica_id": one.replica_id,
                "finished_at": _finished_at(report, one.replica_id),
                "staged_ms": one.stage_ms,
                "paused_ms": one.stall_ms,
                "canary_ms": one.canary_ms,
                "kv_policy": report.kv_policy.value,
                "transport": one.transport,
                "num_bytes": one.num_bytes,
                "error": one.error,
            }
            for report in reports
            if version in (None, report.version)
            for one in report.replicas
        ]
        return json_response({"rows": rows})

    async def _jobs(self, deployment_id: str = "") -> tuple[PublishedSource, tuple[UpdateJob, ...]]:
        """Return the store and its hot loads. Raises Conflict without a store, NotFound for another deployment."""
        found = await self._admin.ask(self._coordinator.update_jobs())
        if found.source is None:
            raise Conflict(
                "hot load is not enabled: set `weights` with `follows: false` in the service's config",
                param="weights",
            )
        if deployment_id not in ("", found.source.run):
            raise NotFound(
                f"unknown deployment {deployment_id!r}: this service is the deployment {found.source.run!r}, the"
                " `run` of `weights` in its config",
                param="deploymentId",
            )
        return found.source, found.jobs


def _job(jobs: tuple[UpdateJob, ...], hot_load_id: str) -> UpdateJob:
    if (job := next((job for job in jobs if job.job_id == hot_load_id), None)) is None:
        raise NotFound(f"unknown hot load {hot_load_id!r}", param="hotLoadId")
    return job


def _hot_load(job: UpdateJob, source: PublishedSource) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "id": job.job_id,
        "deploymentId": source.run,
        "identity": job.folder,
        "type": "SNAPSHOT_TYPE_INCREMENTAL" if job.base else "SNAPSHOT_TYPE_FULL",
        "promptCachePolicy": _POLICY_NAMES.get(job.kv_policy, "PROMPT_CACHE_POLICY_UNSPECIFIED"),
        "snapshotChain": [
            {"identity": name, "type": "SNAPSHOT_TYPE_INCREMENTAL" if at else "SNAPSHOT_TYPE_FULL"}
            for at, (_, name) in enumerate(reversed(job.names))
        ],
    }
    if job.base:
        spec["incrementalSnapshotMetadata"] = DeltaBody(previousSnapshotIdentity=job.base).model_dump(by_alias=True)
    code, _, message = job.error.partition(": ")
    ended = None if job.is_open else _time(job.updated_at)
    outcome = {JobState.COMPLETED: "STATUS_TRUE", JobState.FAILED: "STATUS_FALSE"}.get(job.state, "STATUS_UNKNOWN")
    status = {
        "state": _STATES[job.state],
        "createdAt": _time(job.created_at),
        "updatedAt": _time(job.updated_at),
        "finishedAt": ended,
        "canceledAt": ended if job.state is JobState.CANCELLED else None,
        "conditions": [{"type": "Completed", "status": outcome, "reason": code, "message": message}],
    }
    return {"spec": spec, "status": status}


def _replica(
    replica: ReplicaStatus,
    job: UpdateJob,
    jobs: tuple[UpdateJob, ...],
    status: ServiceStatus,
    report: UpdateReport | None,
) -> dict[str, Any]:
    """Return a replica's row."""
    error = replica.error if replica.state in ("quarantined", "suspect") else None
    is_awaited = job.state is JobState.RUNNING and replica.replica_id in (status.update or _NO_UPDATE).waits_for
    if error is not None:
        state = "ERROR"
    elif replica.state == "updating" or is_awaited:
        state = "UPDATING"
    elif replica.state != "ready" or (job.is_open and replica.weight_version != job.version):
        state = "PENDING_UPDATE"
    else:
        state = "READY"
    finished = None if report is None else _finished_at(report, replica.replica_id)
    return {
        "name": replica.replica_id,
        "zone": replica.host,
        "state": state,
        "currentSnapshotIdentity": _identity(replica.weight_version, jobs, status),
        "errorReason": error or "",
        "startedAt": None if job.version is None else _time(job.created_at),
        "finishedAt": None if finished is None else _time(finished),
        "transitionedAt": None if finished is None else _time(finished),
    }


def _identity(version: int | None, jobs: tuple[UpdateJob, ...], status: ServiceStatus) -> str:
    """Return the snapshot that became a version; empty if the version came by another way."""
    loaded = JobState.RUNNING, JobState.COMPLETED
    named = [job.folder for job in jobs if job.version == version and job.state in loaded]
    if named or version is None:
        return named[-1] if named else ""
    is_first = all(report.version > version for report in status.updates if not report.adapter)
    return INITIAL if is_first else ""


def _finished_at(report: UpdateReport, replica_id: str) -> float | None:
    """Return the Unix time from which a replica samples with the version; None if it failed, or if unknown."""
    one = next((one for one in report.replicas if one.replica_id == replica_id), None)
    if one is None or one.error is not None or not report.began_at:
        return None
    return report.began_at + (one.paused_at_ms + one.stall_ms + one.canary_ms) / 1000.0


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _error(error: AgentLoopError) -> dict[str, Any]:
    code = "ALREADY_EXISTS" if isinstance(error, HotLoadExists) else _CODES.get(error.http_status, "INTERNAL")
    return {"code": code, "message": error.message, **error.to_wire()}
