"""What the answers of several dialects say alike: usage, versions, the session, and the frame of OpenAI's."""

from __future__ import annotations

from typing import Any

from agentloop.chat.call import ChatResult
from agentloop.chat.openai_bodies import CallBase
from agentloop.trajectory import Node

Answer = dict[str, Any]


def answer_of(result: ChatResult, body: CallBase, id_prefix: str, kind: str, choices: list[Answer]) -> Answer:
    """What OpenAI's answers have in common, around `choices`."""
    answer: Answer = {
        "id": f"{id_prefix}-{result.call_id}",
        "object": kind,
        "created": result.created_at,
        "model": body.model,
        "system_fingerprint": fingerprint(result),
        "choices": choices,
        "usage": usage_of(result),
        "session": session_extra(result),
    }
    if body.return_token_ids:
        answer["prompt_token_ids"] = list(result.prompt_ids)
    return answer


def usage_of(result: ChatResult) -> Answer:
    """Token counts; the prompt counts once, however many choices there are."""
    num_prompt = len(result.prompt_ids)
    num_sampled = sum(len(node.reply.token_ids) for node in result.choices)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": result.choices[0].reply.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": sum(node.reply.num_reasoning_tokens for node in result.choices)
        },
    }


def fingerprint(result: ChatResult) -> str | None:
    """The weight version of the answer's last token, as a label."""
    spans = result.choices[0].reply.weight_versions
    return f"v{spans[-1].version}" if spans else None


def versions_of(node: Node) -> list[Answer]:
    """The spans of weight versions, over the choice's `token_ids`."""
    return [{"version": s.version, "start": s.start, "end": s.end} for s in node.reply.weight_versions]


def session_extra(result: ChatResult) -> Answer:
    """What became of the call in its session: its turns, how history was matched, what the calls' tokens are."""
    first = result.choices[0]
    calls = [
        {
            "choice": index,
            "id": call.id,
            "status": call.status.value,
            "token_start": call.token_start,
            "token_end": call.token_end,
            "error": call.error,
        }
        for index, node in enumerate(result.choices)
        for call in node.reply.message.tool_calls
    ]
    return {
        "session_id": result.session_id,
        "turn_ids": [node.node_id for node in result.choices],
        "parent_turn_id": first.parent_id,
        "split_reason": None if first.split is None else first.split.reason.value,
        "split_detail": None if first.split is None else first.split.detail,
        "tool_calls": calls,
    }
