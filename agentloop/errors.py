"""All errors that the service raises deliberately.

    AgentLoopError
    ├── InvalidRequest                  400  the caller's fault; `param` is the field
    │   ├── ContextLengthExceeded            the prompt does not fit into the context
    │   ├── CheckpointUnreadable             the weights cannot be read or do not fit the model
    │   │   ├── PointerMissing               a store of versions has no `latest`
    │   │   ├── PointerWentBack              `latest` is older than the served or published version
    │   │   ├── WrongRun                     the store has the versions of another run
    │   │   ├── VersionMissing               a version, or the base of its delta, is not in the store
    │   │   ├── VersionDamaged               a torn file or index
    │   │   ├── WrongBase                    a delta relative to a version other than the current one
    │   │   ├── LayoutMismatch               names, dtypes or shapes differ from the base's
    │   │   └── ChecksumMismatch             a tensor differs from the published one
    │   └── UnsupportedParameter             not implemented, and ignoring it would change the result
    ├── Unauthorized                    401
    ├── Forbidden                       403  a valid key without permission
    │   └── StoreRefused                         a store of versions refuses our credentials
    ├── NotFound                        404
    │   ├── ModelNotFound
    │   ├── SessionNotFound
    │   └── ResponseNotFound                 no turn of the caller has this response or item id
    ├── Conflict                        409  not possible in the current state
    │   ├── SessionFinished                  the session has ended before the call
    │   ├── AdapterInUse                     calls or rollouts use the adapter
    │   └── WeightVersionNotServed           no accepted weight version is served: retry later
    ├── Gone                            410  an expired session
    │   └── SessionLost                      the session was on a lost host
    ├── Overloaded                      429  a limit is reached; retry later
    │   └── AdaptersFull                         every adapter slot is in use
    ├── DeadlineExceeded                504
    ├── EngineError                     500
    │   ├── EnginePaused                503  retry after the resume
    │   ├── EngineLost                  503  the process or connection is lost: retry on another replica
    │   │   └── EngineUnreachable            no connection: the request was not received
    │   ├── EngineUnusable              503  the state of the weights is unknown: retry on another replica
    │   └── MalformedEngineResponse     502  invalid lengths, ids or logprobs; never stored
    ├── NoHealthyReplica                503
    ├── ServiceUnavailable              503  a part of the service is starting, restarting or lost
    │   └── StoreUnreachable                     a store of versions does not respond
    ├── StorageFull                     507  the disk is full or not writable: no data is lost, free disk space
    ├── WeightUpdateFailed              500  no replica serves partial weights; the message names the failed ones
    │   └── WeightsRefused                   the weights arrived, but their logits are not finite or all equal
    ├── TemplateError                   400  the chat template cannot be used
    │   └── TemplateNotPrefixStable          a later turn does not extend the earlier tokens
    ├── ParserMismatch                  400  the parser cannot read the model's chat format
    ├── ToolError                            becomes a tool message; never ends a trajectory
    ├── ToolLost                             ends its trajectory; the policy is not at fault
    ├── RewardError                          becomes a failed reward; never loses a trajectory
    └── InvariantBroken                 500  a bug: misaligned data, spans with gaps

`code` is stable and machine-readable. `retryable` is true if the same call can succeed later or on another replica.
All errors can be pickled (Ray) and converted with `to_wire` and `from_wire` (HTTP). No code matches message texts.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any, ClassVar


class AgentLoopError(Exception):
    """Base class. `str(error)` is one line; `param` is the invalid field of the request, if any."""

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, details: Mapping[str, Any] | None = None) -> None:
        """`details` is additional JSON data for the caller."""
        super().__init__(message)
        self.message = message
        self.param = param
        self.details = details

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.param, self.details)

    def to_wire(self) -> dict[str, Any]:
        """Return the body of an error response, in the OpenAI envelope."""
        kind = "invalid_request_error" if self.http_status < 500 else "server_error"
        body = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": body if self.details is None else {**body, "details": self.details}}


def _rebuild(
    cls: type[AgentLoopError], message: str, param: str | None, details: Mapping[str, Any] | None
) -> AgentLoopError:
    return cls(message, param=param, details=details)


def from_wire(body: Any, status: int) -> AgentLoopError:
    """Return the error of a response, as the class of its `code` or else of its HTTP status. Never raises."""
    envelope = body.get("error") if isinstance(body, dict) else None
    if not isinstance(envelope, dict):
        envelope = {}
    message = str(envelope.get("message") or f"HTTP {status} without an error body")
    by_code = {cls.code: cls for cls in _walk(AgentLoopError)}
    cls = by_code.get(str(envelope.get("code")))
    if cls is None:
        by_status = {401: Unauthorized, 403: Forbidden, 404: NotFound, 409: Conflict, 429: Overloaded}
        cls = by_status.get(
            status, ServiceUnavailable if status == 503 else InvalidRequest if status < 500 else AgentLoopError
        )
    return cls(message, param=envelope.get("param"), details=envelope.get("details"))


def _walk(cls: type[AgentLoopError]) -> list[type[AgentLoopError]]:
    return [cls, *(descendant for child in cls.__subclasses__() for descendant in _walk(child))]


class InvalidRequest(AgentLoopError):
    code, http_status = "invalid_request", 400


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class CheckpointUnreadable(InvalidRequest):
    code = "checkpoint_unreadable"


class PointerMissing(CheckpointUnreadable):
    code = "pointer_missing"


class PointerWentBack(CheckpointUnreadable):
    code = "pointer_went_back"


class WrongRun(CheckpointUnreadable):
    code = "wrong_run"


class VersionMissing(CheckpointUnreadable):
    code = "version_missing"


class VersionDamaged(CheckpointUnreadable):
    code = "version_damaged"


class WrongBase(CheckpointUnreadable):
    code = "wrong_base"


class LayoutMismatch(CheckpointUnreadable):
    code = "layout_mismatch"


class ChecksumMismatch(CheckpointUnreadable):
    code = "checksum_mismatch"


class UnsupportedParameter(InvalidRequest):
    code = "unsupported_parameter"


class Unauthorized(AgentLoopError):
    code, http_status = "unauthorized", 401


class Forbidden(AgentLoopError):
    code, http_status = "forbidden", 403


class StoreRefused(Forbidden):
    code = "store_refused"


class NotFound(AgentLoopError):
    code, http_status = "not_found", 404


class ModelNotFound(NotFound):
    code = "model_not_found"


class SessionNotFound(NotFound):
    code = "session_not_found"


class ResponseNotFound(NotFound):
    code = "response_not_found"


class Conflict(AgentLoopError):
    code, http_status = "conflict", 409


class SessionFinished(Conflict):
    code = "session_finished"


class AdapterInUse(Conflict):
    code, retryable = "adapter_in_use", True


class WeightVersionNotServed(Conflict):
    """No replica serves a weight version that the call accepts.

    `details` has `served` and, for a partial answer, `token_ids`, `logprobs` and `weight_versions`.
    """

    code, retryable = "weight_version_not_served", True


class Gone(AgentLoopError):
    code, http_status = "gone", 410


class SessionLost(Gone):
    code = "session_lost"


class Overloaded(AgentLoopError):
    code, http_status, retryable = "overloaded", 429, True


class AdaptersFull(Overloaded):
    code = "adapters_full"


class DeadlineExceeded(AgentLoopError):
    code, http_status = "deadline_exceeded", 504


class EngineError(AgentLoopError):
    code = "engine_error"


class EnginePaused(EngineError):
    code, http_status, retryable = "engine_paused", 503, True


class EngineLost(EngineError):
    code, http_status, retryable = "engine_lost", 503, True


class EngineUnreachable(EngineLost):
    code = "engine_unreachable"


class EngineUnusable(EngineError):
    code, http_status, retryable = "engine_unusable", 503, True


class MalformedEngineResponse(EngineError):
    code, http_status, retryable = "malformed_engine_response", 502, True


class NoHealthyReplica(AgentLoopError):
    code, http_status, retryable = "no_healthy_replica", 503, True


class ServiceUnavailable(AgentLoopError):
    code, http_status, retryable = "service_unavailable", 503, True


class StoreUnreachable(ServiceUnavailable):
    code = "store_unreachable"


class StorageFull(AgentLoopError):
    code, http_status, retryable = "storage_full", 507, True


class WeightUpdateFailed(AgentLoopError):
    code = "weight_update_failed"


class WeightsRefused(WeightUpdateFailed):
    code = "weights_refused"


class TemplateError(AgentLoopError):
    code, http_status = "template_error", 400


class TemplateNotPrefixStable(TemplateError):
    code = "template_not_prefix_stable"


class ParserMismatch(AgentLoopError):
    code, http_status = "parser_mismatch", 400


class ToolError(AgentLoopError):
    code = "tool_error"


class ToolLost(AgentLoopError):
    """A tool's session is lost and the policy is not at fault. The trajectory ends as `tool_failed`."""

    code = "tool_lost"


class RewardError(AgentLoopError):
    code = "reward_error"


class InvariantBroken(AgentLoopError):
    code = "invariant_broken"


MAX_ERROR_LINE_CHARS = 1000


def retry_after_s(header: str | None) -> float | None:
    """Return the seconds of a `Retry-After` header; None if it is missing or a date."""
    try:
        return max(0.0, float(header or ""))
    except ValueError:
        return None


def error_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message, for a record.

    Never raises: a message whose `__str__` fails is omitted, and text that UTF-8 cannot encode is escaped.
    """
    try:
        first_line = next(iter(str(error).splitlines()), "")
    except BaseException:  # __str__ may be user code
        first_line = ""
    line = f"{type(error).__name__}: {first_line[:MAX_ERROR_LINE_CHARS]}" if first_line else type(error).__name__
    return line.encode(errors="backslashreplace").decode()


def first_cause(error: BaseException) -> BaseException:
    """Return the first error in nested exception groups, or the error itself if it is not a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def error_trace(error: BaseException) -> str:
    """Return the last 8 frames of an error's traceback, for a log. Safe if `__str__` raises."""
    return "".join(traceback.format_exception(error, limit=-8))
