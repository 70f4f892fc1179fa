"""Registration of this package's routes, and of SGLang's dialect of `POST /generate`."""

from __future__ import annotations

from fastapi import APIRouter

from agentloop_contracts.hot_load import HotLoadRoutes
from agentloop_contracts.sglang_bodies import ANSWER_SCHEMA, SglangBody
from agentloop_contracts.sglang_calls import SglangCalls
from agentloop_contracts.sglang_control import SglangControlRoutes
from agentloop_contracts.tinker import TinkerRoutes
from agentloop_contracts.vllm_calls import VllmCalls
from agentloop_contracts.vllm_control import VllmControlRoutes
from agentloop_servers.ingress.routes import GenerateDialect, RouteContext


def contracts(context: RouteContext) -> APIRouter:
    """Return the routes of both dialects; no routes for a service without an endpoint for agents."""
    router = APIRouter()
    endpoint, token_calls, keys = context.endpoint, context.token_calls, context.keys
    if endpoint is None or token_calls is None:
        return router
    sglang, coordinator, admin = SglangCalls(endpoint, token_calls), context.coordinator, context.admin
    context.generate_dialects.append(
        GenerateDialect("sglang", frozenset({"input_ids", "text"}), SglangBody, sglang.generate, ANSWER_SCHEMA)
    )
    for routes in (
        VllmCalls(endpoint, token_calls),
        sglang,
        VllmControlRoutes(coordinator, admin, endpoint),
        SglangControlRoutes(coordinator, admin, sglang, endpoint),
        HotLoadRoutes(coordinator, admin, endpoint),
        TinkerRoutes(endpoint, token_calls),
    ):
        router.include_router(routes.router(keys))
    return router
