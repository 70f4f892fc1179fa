"""Bad bodies of vLLM's routes: extends the table of `tests/servers/endpoint/test_bad_input.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from tests.servers.endpoint.test_bad_input import NOT_JSON, UNSUPPORTED, Case, check_refused
from tests.support.endpoint.chat_service import SPEC, ChatService, chat_service

TOKENS = "/inference/v1/generate"
UPDATE = "/update_weights"
GOOD = {"token_ids": [5], "sampling_params": {"max_tokens": 1}}


def tokens(**fields: Any) -> bytes:
    """Return the valid body of the token route with these fields."""
    return orjson.dumps({**GOOD, **fields})


def drawn(**fields: Any) -> bytes:
    """Return the valid body of the token route with these fields in its `sampling_params`."""
    return tokens(sampling_params={"max_tokens": 1, **fields})


CASES: dict[str, Case] = {
    **{f"{name}, tokens": Case(body, path=TOKENS) for name, body in NOT_JSON.items()},
    "46 tokens, negative": Case(tokens(token_ids=[5, -1]), "token_ids.1", path=TOKENS),
    "46 tokens, a bool": Case(tokens(token_ids=[True]), "token_ids.0", path=TOKENS),
    "46 tokens, none": Case(tokens(token_ids=[]), "token_ids", path=TOKENS),
    "46 tokens, beyond the vocabulary": Case(tokens(token_ids=[SPEC.vocab_size]), "token_ids", path=TOKENS),
    "46 tokens, 2 million": Case(tokens(token_ids=[5] * 2_000_000), "token_ids", path=TOKENS),
    "46 tokens without sampling_params": Case(b'{"token_ids": [5]}', "sampling_params", path=TOKENS),
    "46 tokens, all logprobs": Case(drawn(logprobs=-1), "sampling_params.logprobs", path=TOKENS),
    "46 tokens, 21 logprobs": Case(drawn(logprobs=21), "sampling_params.logprobs", path=TOKENS),
    "46 tokens, n of 0": Case(drawn(n=0), "sampling_params.n", path=TOKENS),
    "46 tokens, text for a number": Case(drawn(temperature="1"), "sampling_params.temperature", path=TOKENS),
    "46 tokens, misspelt field": Case(drawn(max_token=5), "sampling_params.max_token", path=TOKENS),
    "46 tokens, unknown field": Case(tokens(prompt="hi"), "prompt", path=TOKENS),
    "46 tokens, stop token beyond the vocabulary": Case(
        drawn(stop_token_ids=[SPEC.vocab_size]), "sampling_params.stop_token_ids", path=TOKENS
    ),
    "46 tokens, empty salt": Case(tokens(cache_salt=""), "cache_salt", path=TOKENS),
    "46 tokens, long salt": Case(tokens(cache_salt="x" * 1025), "cache_salt", path=TOKENS),
    "46 tokens, stream": Case(tokens(stream=True), "stream", code=UNSUPPORTED, path=TOKENS),
    "46 tokens, text": Case(tokens(output_mode="text"), "output_mode", code=UNSUPPORTED, path=TOKENS),
    "46 tokens, features": Case(tokens(features={"mm_hashes": {}}), "features", code=UNSUPPORTED, path=TOKENS),
    "46 tokens, priority": Case(tokens(priority=1), "priority", code=UNSUPPORTED, path=TOKENS),
    "46 tokens, 21 prompt_logprobs": Case(
        drawn(prompt_logprobs=21), "sampling_params.prompt_logprobs", path=TOKENS
    ),
    "46 tokens, structured_outputs": Case(
        drawn(structured_outputs={"regex": "a"}),
        "sampling_params.structured_outputs",
        code=UNSUPPORTED,
        path=TOKENS,
    ),
    "46 tokens, bad_words": Case(
        drawn(bad_words=["a"]), "sampling_params.bad_words", code=UNSUPPORTED, path=TOKENS
    ),
    "47 tokens beyond the context": Case(
        tokens(token_ids=[5] * 5000), "token_ids", code="context_length_exceeded", path=TOKENS
    ),
    "47 tokens, max_tokens of 0": Case(drawn(max_tokens=0), "sampling_params.max_tokens", path=TOKENS),
    "47 tokens, min_tokens above max_tokens": Case(drawn(min_tokens=2), "sampling_params.min_tokens", path=TOKENS),
    "50 tokens, unknown model": Case(tokens(model="g"), "model", 404, "model_not_found", TOKENS),
    "50 tokens, unknown session": Case(
        tokens(), "session_id", 404, "session_not_found", f"/sessions/nobody{TOKENS}"
    ),
    "46 weights, unknown field": Case(b'{"weight_dir": "/x", "force": true}', "force", path=UPDATE),
    "46 weights, a number": Case(b'{"weight_dir": 5}', "weight_dir", path=UPDATE),
    "46 weights, relative": Case(b'{"weight_dir": "../etc"}', "weight_dir", path=UPDATE),
    "46 weights, version below 0": Case(b'{"weight_dir": "/x", "version": -1}', "version", path=UPDATE),
    "46 adapter without a path": Case(b'{"lora_name": "a"}', "lora_path", path="/load_lora_adapter"),
}


@pytest.fixture(scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChatService]:
    """One service for the whole table: no case may leave a trace in it."""
    async with chat_service(tmp_path_factory.mktemp("bad-bodies")) as service:
        yield service
        assert (await service.call("POST", TOKENS, json=GOOD))[0] == 200


@pytest.mark.parametrize("name", CASES)
async def test_bad_bodies(service: ChatService, name: str) -> None:
    await check_refused(service, CASES[name])


async def test_the_wrong_media_type_is_named(service: ChatService) -> None:
    case = Case(tokens(), "content-type", path=TOKENS)
    await check_refused(service, case, {"content-type": "text/plain"})
