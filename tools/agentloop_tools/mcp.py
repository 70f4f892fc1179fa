"""Tools of an MCP server: one `Tool` per tool that the server lists, over stdio or streamable HTTP.

    files = McpTools(["uvx", "mcp-server-git"], is_shared=False)      # one server process per trajectory
    search = McpTools("https://search.example/mcp", names=["search"])  # one connection for all trajectories

Isolation: none. The operator chooses the server, and the policy reads its results as text. A stdio server receives
only the environment variables of the SDK and those in `env`, not the worker's.

The SDK runs on a separate event loop in a thread, so that a server that sends too much data does not delay turns.
The policy reads results with `is_error` and JSON-RPC errors of the server, but never transport failures: those are
retried if the call cannot have run twice, or else end the trajectory (`ToolLost`). Protocol: version 2026-07-28
(SDK 2.3) and earlier.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import httpx2
import orjson
import structlog
from mcp import Client, MCPError, StdioServerParameters
from mcp import Tool as ListedTool
from mcp.client.streamable_http import streamable_http_client
from mcp.types import (
    CONNECTION_CLOSED,
    INVALID_PARAMS,
    PARSE_ERROR,
    CallToolResult,
    EmbeddedResource,
    TextContent,
    TextResourceContents,
)
from pydantic import ValidationError

from agentloop.concurrency.aio import LoopThread
from agentloop.errors import InvalidRequest, ToolError, ToolLost, error_line, first_cause, retry_after_s
from agentloop.rollout.tool import ToolSpec
from agentloop.types import JSON, RolloutTask

MAX_CONNECTS = 4  # attempts to connect in one round
FIRST_PAUSE_S = 0.25  # before the second attempt; doubled for each further one
AWAY_S = 5.0  # after a failed round, calls fail immediately for this time
MAX_TOOLS = 512  # per server
CALL_ATTEMPTS = 3  # attempts of one call
LEAVE_S = 7.0  # the SDK closes a stdio server's input, then terminates it, then kills it: 2 s each

_log = structlog.stdlib.get_logger(__name__)
T = TypeVar("T")


class ConnectionBroke(Exception):
    """The server is unreachable, closed the connection or did not answer a call. The message is one line."""

    def __init__(
        self, message: str, *, was_refused: bool = False, has_session: bool = False, retry_after_s: float = 0.0
    ) -> None:
        """`was_refused`: the call did not run. `has_session`: the connection and its state are still usable."""
        super().__init__(message)
        self.was_refused = was_refused
        self.has_session = has_session
        self.retry_after_s = retry_after_s


_FAILED_EXCHANGE, _VERDICT = -32098, -32097  # codes of the JSON-RPC errors that `_StrictClient` creates


class _StrictClient(httpx2.AsyncClient):
    """The HTTP client of the MCP SDK, which separates the server's errors from failed requests.

    The SDK reports a proxy's error page, a lost session or an empty body as an error of the server. This client
    gives such failures the code `_FAILED_EXCHANGE`, and the server's own errors the code `_VERDICT`.
    """

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        response = await super().send(request, **options)
        sent = orjson.loads(request.content) if request.method == "POST" else None
        if not isinstance(sent, dict) or sent.get("method") != "tools/call":
            return response
        error = await _error_of(response, sent["id"])
        if error is None:
            return response
        await response.aclose()
        return httpx2.Response(200, json={"jsonrpc": "2.0", "id": sent["id"], "error": error}, request=request)


async def _error_of(response: httpx2.Response, call_id: Any) -> dict[str, Any] | None:
    """Return the JSON-RPC error for a response to a call; None if the response is a result or a stream."""
    status, kind = response.status_code, response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if status == 200 and kind == "text/event-stream":
        return None
    text = (await response.aread()).decode(errors="replace")
    try:
        answer = orjson.loads(text) if kind == "application/json" else None
    except orjson.JSONDecodeError:
        answer = None
    if isinstance(answer, dict) and answer.get("id") == call_id:
        if status == 200 and "result" in answer:
            return None
        error = answer.get("error")
        # Since protocol version 2026, the server's error for invalid arguments has status 400.
        if isinstance(error, dict) and (status == 200 or (status == 400 and error.get("code") == INVALID_PARAMS)):
            return {"code": _VERDICT, "message": str(error.get("message"))}
    after = response.headers.get("retry-after")
    is_busy = status == 429 or (status == 503 and after is not None)
    failure = {"was_refused": status == 404 or is_busy, "has_session": status != 404}
    details = {**failure, "retry_after_s": retry_after_s(after) or 0.0}  # the arguments of `ConnectionBroke`
    message = f"HTTP {status} {' '.join(text.split())[:200]}".strip()
    return {"code": _FAILED_EXCHANGE, "message": message, "data": details}


class McpTools:
    """The tools of a server, as a `ToolSet` for a worker's config. It connects when the tools are loaded."""

    def __init__(
        self,
        server: str | Sequence[str],
        *,
        is_shared: bool = True,
        names: Sequence[str] | None = None,
        prefix: str = "",
        env: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        call_timeout_s: float = 30.0,
        connect_timeout_s: float = 20.0,
        max_output_bytes: int = 65_536,
        max_concurrency: int = 64,
    ) -> None:
        """`server` is a URL, with optional `headers`, or a command line as a list, with optional `env`.

        `names` selects some of the listed tools. `prefix` is prepended to the names that the policy sees. If the
        server is not shared, each trajectory has its own connection for all tools, opened before its loop starts.
        """
        self.server = server
        self.is_shared = is_shared  # one connection for all trajectories
        self._names = names
        self._prefix = prefix
        self._env = dict(env or {})
        self._headers = dict(headers or {})
        self.call_timeout_s = call_timeout_s  # for one attempt of a call
        self.connect_timeout_s = connect_timeout_s  # for one attempt to connect
        self._max_output_bytes = max_output_bytes
        self._max_concurrency = max_concurrency
        self._thread: LoopThread | None = None
        self._shared = _Link(self)
        self._own: dict[str, _Link] = {}  # by trajectory

    @property
    def label(self) -> str:
        """The URL or command line, for messages."""
        return self.server if isinstance(self.server, str) else " ".join(self.server)

    def tools(self) -> Sequence[McpTool]:
        """Connect to the server and return its tools, or those in `names`. Blocks until they are listed.

        The connection of a shared server stays open. Raises InvalidRequest with param "tools" if the server cannot
        be reached or does not have one of the names.
        """
        try:
            listed = self._start(self._listed()).result(self._round_s + 2 * self.connect_timeout_s)
        except (ConnectionBroke, TimeoutError, MCPError, ValidationError) as error:
            self.stop()
            raise InvalidRequest(f"MCP server {self.label!r}: {_line(error)}", param="tools") from error
        by_name = {tool.name: tool for tool in listed}
        if missing := [name for name in self._names or () if name not in by_name]:
            self.stop()
            raise InvalidRequest(
                f"MCP server {self.label!r} has no tool {missing[0]!r}: name a tool of its list", param="tools"
            )
        wanted = [by_name[name] for name in self._names] if self._names is not None else listed
        return [McpTool(self, tool, self._spec(tool)) for tool in wanted]

    def stop(self) -> None:
        """Stop the thread and everything that runs in it. Idempotent."""
        if self._thread is not None:
            self._thread.stop()
            self._thread = None

    async def close(self) -> None:
        """Close the shared connection. Idempotent."""
        if self._thread is not None:
            try:
                await self.run(self._shared.leave())
            finally:
                self.stop()

    def link(self, trajectory_id: str) -> _Link:
        """Return the connection of a trajectory's tools, and count one more user of it."""
        if self.is_shared:
            return self._shared
        link = self._own.setdefault(trajectory_id, _Link(self))
        link.num_users += 1
        return link

    async def let_go(self, trajectory_id: str, link: _Link) -> None:
        """Remove a user of a trajectory's connection. The last one closes it."""
        link.num_users -= 1
        if not self.is_shared and link.num_users == 0:
            if self._own.get(trajectory_id) is link:
                del self._own[trajectory_id]
            await self.run(link.leave())

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the thread's event loop. A cancellation is passed on to it."""
        return await asyncio.wrap_future(self._start(work))

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """Connect to the server. Raises the SDK's errors."""
        async with AsyncExitStack() as stack:
            if isinstance(self.server, str):
                timeout = httpx2.Timeout(self.connect_timeout_s, read=None)
                http = await stack.enter_async_context(_StrictClient(headers=self._headers, timeout=timeout))
                client = Client(streamable_http_client(self.server, http_client=http))
            else:
                command, *arguments = self.server
                client = Client(StdioServerParameters(command=command, args=arguments, env=self._env))
            yield await stack.enter_async_context(client)

    def _start(self, work: Coroutine[Any, Any, T]) -> Any:
        if self._thread is None:
            self._thread = LoopThread("mcp")
        return self._thread.run(work)

    @property
    def _round_s(self) -> float:
        """The maximum seconds of a round of attempts to connect."""
        return float(MAX_CONNECTS * (self.connect_timeout_s + FIRST_PAUSE_S * 2**MAX_CONNECTS))

    async def _listed(self) -> list[ListedTool]:
        link = self._shared if self.is_shared else _Link(self)
        client, found, cursor = await link.connected(), list[ListedTool](), None
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                while len(found) <= MAX_TOOLS:
                    page = await client.list_tools(cursor=cursor)
                    found += page.tools
                    cursor = page.next_cursor
                    if cursor is None:
                        return found
            raise ConnectionBroke(f"it lists more than the maximum of {MAX_TOOLS} tools")
        finally:
            if not self.is_shared:
                await link.leave()

    def _spec(self, tool: ListedTool) -> ToolSpec:
        reconnect_s = self._round_s if self.is_shared else 0.0
        return ToolSpec(
            name=self._prefix + tool.name,
            description=tool.description or "",
            parameters=tool.input_schema,
            timeout_s=2 * self.call_timeout_s + reconnect_s + 5.0,
            max_output_bytes=self._max_output_bytes,
            max_concurrency=self._max_concurrency,
            has_state=not self.is_shared,
            open_timeout_s=None if self.is_shared else self.connect_timeout_s + 5.0,
            close_timeout_s=LEAVE_S,
        )


class McpTool:
    """One tool of a server."""

    def __init__(self, server: McpTools, listed: ListedTool, spec: ToolSpec) -> None:
        self._server = server
        self._spec = spec
        self.listed_name = listed.name
        hints = listed.annotations
        self.can_repeat = hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)

    @property
    def spec(self) -> ToolSpec:
        return self._spec

    def open_session(self, trajectory_id: str, seed: int) -> McpSession:
        return McpSession(self._server, self, trajectory_id)

    async def close(self) -> None:
        await self._server.close()


class McpSession:
    """One trajectory's session of one tool. A trajectory's sessions of one server share a connection."""

    def __init__(self, server: McpTools, tool: McpTool, trajectory_id: str) -> None:
        self._server = server
        self._tool = tool
        self._trajectory_id = trajectory_id
        self._link = server.link(trajectory_id)

    async def open(self, task: RolloutTask) -> None:
        """Connect, unless a session of another tool has already connected. Raises ToolLost."""
        try:
            await self._server.run(self._link.connected())
        except ConnectionBroke as error:
            raise ToolLost(f"MCP server {self._server.label!r}: {error}") from error

    async def call(self, arguments: Mapping[str, JSON]) -> str:
        return await self._server.run(self._called(dict(arguments)))

    async def close(self) -> None:
        await self._server.let_go(self._trajectory_id, self._link)

    async def _called(self, arguments: dict[str, JSON]) -> str:
        for attempt in range(1, CALL_ATTEMPTS + 1):
            try:
                result = await self._link.call(self._tool.listed_name, arguments)
                break
            except ConnectionBroke as error:
                # Retry only calls that did not run or that may run twice, and never after the state was lost.
                may_repeat = error.was_refused or (self._tool.can_repeat and attempt == 1)
                has_state = self._server.is_shared or error.has_session
                is_soon = error.retry_after_s <= self._server.call_timeout_s
                if attempt == CALL_ATTEMPTS or not (may_repeat and has_state and is_soon):
                    raise ToolLost(f"MCP server {self._server.label!r}: {error}") from error
                await asyncio.sleep(error.retry_after_s)
        text = shown(result)
        if result.is_error:
            raise ToolError(text)
        return text


class _Link:
    """A connection that is opened on first use.

    A broken shared connection is reopened. A trajectory's own connection is not, because its state is lost. All
    methods run on the thread's event loop; `num_users` belongs to the worker's.
    """

    def __init__(self, server: McpTools) -> None:
        self.num_users = 0
        self._server = server
        self._client: Client | None = None
        self._holder: asyncio.Task[None] | None = None
        self._leaving: asyncio.Event | None = None
        self._turn: asyncio.Lock | None = None
        self._is_left = self._was_made = False
        self._away_until, self._reason = 0.0, ""

    async def connected(self) -> Client:
        """Return the client; the first caller connects. Raises ConnectionBroke."""
        self._turn = self._turn or asyncio.Lock()
        async with self._turn:
            if self._client is not None and self._holder is not None and not self._holder.done():
                return self._client
            if self._is_left:
                raise ConnectionBroke("the connection was closed")
            if not self._server.is_shared and self._was_made:
                raise ConnectionBroke("the trajectory's connection is lost, including its state")
            if time.monotonic() < self._away_until:
                raise ConnectionBroke(self._reason)
            return await self._round()

    async def call(self, name: str, arguments: dict[str, JSON]) -> CallToolResult:
        """Call a tool. Raises ConnectionBroke, and ToolError if only the call failed."""
        client = await self.connected()
        assert self._holder is not None, "connected"
        calling = asyncio.create_task(client.call_tool(name, arguments), name=f"mcp {name}")
        try:
            ends: set[asyncio.Task[Any]] = {calling, self._holder}
            done, _ = await asyncio.wait(
                ends, timeout=self._server.call_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if calling in done:
                return calling.result()
            if not done:  # cancelled below; the session stays usable
                raise ToolError(f"timed out after {self._server.call_timeout_s:g} s")
            raise ConnectionBroke("the server closed the connection during a call")
        except MCPError as error:
            if error.code == _FAILED_EXCHANGE:
                failure = ConnectionBroke(error.message, **error.data)
                if not failure.has_session:
                    await self._drop(client)
                raise failure from error
            # The SDK also reports an interrupted or invalid stream as an error of the server.
            if error.code not in (CONNECTION_CLOSED, PARSE_ERROR):
                raise ToolError(_line(error)) from error
            await self._drop(client)
            raise ConnectionBroke("the server closed the connection during a call") from error
        except (OSError, httpx2.HTTPError, ExceptionGroup) as error:
            await self._drop(client)
            raise ConnectionBroke(_line(error)) from error
        except ValidationError as error:
            raise ToolError("the server's response violates the MCP protocol") from error
        finally:
            calling.cancel()

    async def leave(self) -> None:
        """Close the connection permanently. Idempotent."""
        self._is_left = True
        await self._drop(self._client)

    async def _round(self) -> Client:
        """Connect, with retries for a shared server. A trajectory's own connection has one attempt."""
        pause_s, problem = FIRST_PAUSE_S, ""
        for attempt in range(MAX_CONNECTS if self._server.is_shared else 1):
            if attempt:
                await asyncio.sleep(pause_s)
                pause_s *= 2
            try:
                self._client = await self._made()
            except ConnectionBroke as error:
                problem = str(error)
                _log.warning("mcp_not_connected", server=self._server.label, error=problem, attempt=attempt + 1)
                continue
            if self._was_made:
                _log.info("mcp_connected_again", server=self._server.label)
            self._was_made = True
            return self._client
        # For some time, further calls fail immediately instead of waiting for another round each.
        self._away_until, self._reason = time.monotonic() + AWAY_S, problem
        raise ConnectionBroke(problem)

    async def _made(self) -> Client:
        ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._leaving = leaving = asyncio.Event()
        self._holder = holder = asyncio.create_task(self._hold(ready, leaving), name="mcp connection")
        ends: set[asyncio.Future[Any]] = {ready, holder}
        await asyncio.wait(ends, timeout=self._server.connect_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            return ready.result()
        problem = f"no connection within {self._server.connect_timeout_s:g} s"
        if holder.done() and not holder.cancelled():
            problem = _line(holder.exception() or ConnectionBroke("the server closed the connection"))
        holder.cancel()
        raise ConnectionBroke(problem)

    async def _hold(self, ready: asyncio.Future[Client], leaving: asyncio.Event) -> None:
        """Keep the connection open until `leaving` is set. The task that entered the SDK's context must exit it."""
        async with self._server.client() as client:
            ready.set_result(client)
            await leaving.wait()

    async def _drop(self, client: Client | None) -> None:
        """Close the connection of `client`, unless another call has already replaced it."""
        if client is not self._client:
            return
        holder, self._client = self._holder, None
        if holder is None or self._leaving is None:
            return
        self._leaving.set()
        await asyncio.wait({holder}, timeout=LEAVE_S - 1.0)
        if not holder.done():
            holder.cancel()
        elif not holder.cancelled() and (error := holder.exception()) is not None:
            _log.debug("mcp_connection_ended", server=self._server.label, error=_line(error))


def shown(result: CallToolResult) -> str:
    """Return a result as text. Images and sounds are only mentioned, because tool results are text."""
    texts = []
    for block in result.content:
        if isinstance(block, TextContent):
            texts.append(block.text)
        elif isinstance(block, EmbeddedResource) and isinstance(block.resource, TextResourceContents):
            texts.append(block.resource.text)
        else:
            kind = getattr(block, "mime_type", None) or getattr(block, "uri", None) or ""
            texts.append(f"[{block.type} {kind} is not shown: a tool's answer is text]".replace("  ", " "))
    if not texts and result.structured_content is not None:
        return orjson.dumps(result.structured_content).decode()
    return "\n".join(texts)


def _line(error: BaseException) -> str:
    """Return one line for the first cause of an error. The SDK wraps errors in exception groups."""
    error = first_cause(error)
    return str(error) if isinstance(error, ConnectionBroke) else error_line(error)
