"""Bad bodies and parameters against the real chat endpoint: the table specifies each refusal.

The number at the start of each name is the row of the fault table. Every case asserts the status, the code, the
named parameter, the request id and the size of the answer, and that no session is left; afterwards the service
answers valid calls. If an outcome differs from the row's, the case explains it. The file is long because of the
table.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from io import BytesIO
from typing import Any, NamedTuple

import orjson
import pytest

from tests.support.endpoint.chat_service import MODEL, RENDERER, SPEC, ChatService, chat_service

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
SCORES = "/score"
JSON = {"content-type": "application/json"}
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": [USER], "max_tokens": 1},
    COMPLETIONS: {"model": MODEL, "prompt": "hi", "max_tokens": 1},
    RESPONSES: {"model": MODEL, "input": "hi", "max_output_tokens": 1},
    MESSAGES: {"model": MODEL, "messages": [USER], "max_tokens": 1},
    "/sessions": {},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
    f"{CHAT}/render": {"model": MODEL, "messages": [USER]},
}


class Case(NamedTuple):
    body: bytes
    param: str | None = None  # its beginning
    status: int = 400
    code: str = "invalid_request"
    path: str = CHAT


def with_(path: str = CHAT, **fields: Any) -> bytes:
    return orjson.dumps({**GOOD[path], **fields})


def scored(*prompts: list[int], start: int = 1, **fields: Any) -> bytes:
    """Return a body of the score route."""
    return orjson.dumps({"prompts": [{"token_ids": one, "start": start} for one in prompts], **fields})


def raw(field: str, text: str, path: str = CHAT) -> bytes:
    """Return the valid body with a field written verbatim, including text that no JSON library would write."""
    return with_(path)[:-1] + b', "' + field.encode() + b'": ' + text.encode() + b"}"


def user(content: Any) -> bytes:
    return with_(messages=[{"role": "user", "content": content}])


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def answering(schema: Any) -> bytes:
    return with_(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


UNSUPPORTED = "unsupported_parameter"
LONE = b'{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"'
MANY_PARTS = [{"type": "text", "text": 1} for _ in range(12_000)]
SCHEMA = "response_format.json_schema.schema"

# Rows 40 to 44: invalid or ambiguous JSON; the same on every route that has a body

NOT_JSON: dict[str, bytes] = {
    "40 malformed": b"{model: 1}",
    "40 truncated": b'{"model": "tiny", "messages": [{"role": "us',
    "40 trailing": b'{"model": "tiny"} {}',
    "40 empty": b"",
    "40 null": b"null",
    "40 list": b"[]",
    "40 text": b'"model"',
    "40 number": b"7",
    "41 100,000 lists deep": b'{"model": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "41 100,000 objects deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "41 integer of 5,000 digits": b'{"model": ' + b"9" * 5000 + b"}",
    "43 lone surrogate": b'{"model": "\\ud800"}',
    "43 surrogates in the wrong order": b'{"model": "\\udc00\\ud800"}',
    "43 surrogate in a name": b'{"\\udfff": 1}',
    "43 surrogate as bytes": b'{"model": "\xed\xa0\x80"}',
    "44 UTF-16 with a mark": '{"model": "tiny"}'.encode("utf-16"),
    "44 UTF-16 without a mark": '{"model": "tiny"}'.encode("utf-16-le"),
    "44 UTF-8 with a mark": b'\xef\xbb\xbf{"model": "tiny"}',
    "44 invalid UTF-8": b'{"model": "\xff"}',
    "44 overlong UTF-8": b'{"model": "\xc0\xaf"}',
    "44 NUL outside a text": b'{"model": "tiny"\x00}',
}

CASES: dict[str, Case] = {
    "41 integer of 4,000 digits": Case(raw("seed", "9" * 4000), "seed"),
    "41 nesting below the parser's bound": Case(raw("metadata", "[" * 150 + "]" * 150), "metadata"),
    # Row 42: numbers that are not finite
    "42 NaN": Case(raw("temperature", "NaN"), "temperature"),
    "42 Infinity": Case(raw("temperature", "Infinity"), "temperature"),
    "42 -Infinity": Case(raw("frequency_penalty", "-Infinity"), "frequency_penalty"),
    "42 1e999": Case(raw("top_p", "1e999"), "top_p"),
    "42 NaN of a bias": Case(raw("logit_bias", '{"5": NaN}'), "logit_bias"),
    "42 NaN in what is ignored": Case(raw("metadata", '{"a": [NaN]}'), "metadata"),
    "42 NaN in a schema": Case(
        raw("tools", '[{"type": "function", "function": {"name": "f", "parameters": {"maximum": NaN}}}]'), "tools.0"
    ),
    "42 NaN, responses": Case(raw("temperature", "NaN", RESPONSES), "temperature", path=RESPONSES),
    "42 NaN, messages": Case(raw("top_p", "1e999", MESSAGES), "top_p", path=MESSAGES),
    "42 NaN, completions": Case(raw("temperature", "NaN", COMPLETIONS), "temperature", path=COMPLETIONS),
    "42 NaN, sessions": Case(b'{"ttl_s": NaN}', "ttl_s", path="/sessions"),
    "43 lone surrogate in content": Case(LONE + b'\\ud800"}]}'),
    "43 half a pair at the end of content": Case(LONE + b'ok \\ud83d"}]}'),
    # Row 45: a very large number of faults
    "45 12,000 bad parts": Case(user(MANY_PARTS), "messages.0.content"),
    "45 1,000 bad parts": Case(user(MANY_PARTS[:1000]), "messages.0.content"),
    "45 8,000 bad messages": Case(with_(messages=[{"role": "user", "content": 1}] * 8000), "messages.0"),
    "45 12,000 messages": Case(with_(messages=[USER] * 12_000), "messages"),
    "45 12,000 unknown fields": Case(with_(**{f"field_{i}": 1 for i in range(12_000)}), "field_0"),
    "45 unknown field of 1 MB": Case(with_(**{"x" * 1_000_000: 1}), "xxx"),
    "45 12,000 bad items, responses": Case(
        with_(RESPONSES, input=[{"role": "user", "content": 1}] * 12_000), "input.0", path=RESPONSES
    ),
    "45 12,000 bad messages, messages": Case(
        with_(MESSAGES, messages=[{"role": "user", "content": 1}] * 8000), "messages.0", path=MESSAGES
    ),
    "45 text of 1 MB where a choice is due": Case(with_(tool_choice="x" * 1_000_000), "tool_choice"),
    "45 role of 1 MB": Case(with_(messages=[{"role": "x" * 1_000_000, "content": ""}]), "messages.0"),
    # Row 46: wrong types and absurd sizes
    "46 bool for an integer": Case(with_(max_tokens=True), "max_tokens"),
    "46 bool for a number": Case(with_(temperature=True), "temperature"),
    "46 text for a number": Case(with_(temperature="1"), "temperature"),
    "46 text for a bool": Case(with_(stream="true"), "stream"),
    "46 number for a bool": Case(with_(stream=1), "stream"),
    "46 number for text": Case(user(5), "messages.0.content"),
    "46 float for an integer": Case(with_(n=1.5), "n"),
    "46 seed of 2^70": Case(raw("seed", str(1 << 70)), "seed"),
    "46 max_tokens of 2^70": Case(raw("max_completion_tokens", str(1 << 70)), "max_completion_tokens"),
    "46 n of a million": Case(with_(n=1_000_000), "n"),
    "46 n of 0": Case(with_(n=0), "n"),
    "46 stop of 1 MB": Case(with_(stop="x" * 1_000_000), "stop"),
    "46 stop without text": Case(with_(stop=[""]), "stop.0"),
    "46 five stops": Case(with_(stop=list("abcde")), "stop"),
    "46 100,000 tools": Case(with_(tools=[TOOL] * 100_000), "tools"),
    "46 two tools of one name": Case(with_(tools=[TOOL, TOOL]), "tools"),
    "46 bad tool name": Case(with_(tools=[{**TOOL, "function": {"name": "a b"}}]), "tools.0.function.name"),
    "46 logit_bias of a million": Case(
        b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"logit_bias":{'
        + b",".join(b'"%d":1' % i for i in range(1_000_000))
        + b"}}",
        "logit_bias",
    ),
    "46 logit_bias that is too strong": Case(with_(logit_bias={"5": 101}), "logit_bias"),
    "46 logit_bias of no token": Case(with_(logit_bias={"five": 1}), "logit_bias"),
    "46 logit_bias beyond the vocabulary": Case(with_(logit_bias={str(SPEC.vocab_size): 1}), "logit_bias"),
    "46 temperature of 3": Case(with_(temperature=3), "temperature"),
    "46 temperature below 0": Case(with_(temperature=-0.1), "temperature"),
    "46 top_p of 1.1": Case(with_(top_p=1.1), "top_p"),
    "46 penalty of 3": Case(with_(presence_penalty=3), "presence_penalty"),
    "46 top_logprobs of 21": Case(with_(logprobs=True, top_logprobs=21), "top_logprobs"),
    "46 top_logprobs without logprobs": Case(with_(top_logprobs=2), "top_logprobs"),
    "46 unknown field": Case(with_(guided_json={}), "guided_json"),
    "46 misspelt field": Case(with_(max_token=5), "max_token"),
    "46 no messages": Case(with_(messages=[]), "messages"),
    "46 no messages at all": Case(b'{"model": "tiny"}', "messages"),
    "46 unknown role": Case(with_(messages=[{"role": "tester", "content": "x"}]), "messages.0"),
    "46 content of no kind": Case(user({"type": "text"}), "messages.0.content"),
    "46 tool message without an id": Case(with_(messages=[{"role": "tool", "content": "x"}]), "messages.0"),
    "46 tool_choice without tools": Case(with_(tool_choice="required"), "tool_choice"),
    "46 tool_choice of an unknown tool": Case(
        with_(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}), "tool_choice"
    ),
    "46 reward that is text": Case(b'{"reward": "1"}', "reward", path="/sessions/bad-input/reward"),
    "46 wait beyond the bound": Case(b'{"wait_s": 1e9}', "wait_s", path="/sessions/bad-input/finish"),
    "46 ttl below 0": Case(b'{"ttl_s": -1}', "ttl_s", path="/sessions"),
    "46 bad session id": Case(b'{"session_id": "a b"}', "session_id", path="/sessions"),
    "46 long session id": Case(orjson.dumps({"session_id": "a" * 129}), "session_id", path="/sessions"),
    "46 bad session in a body": Case(with_(session="../etc"), "session"),
    "46 two sessions in a body": Case(with_(session="a", session_id="b")),
    "46 scores of nothing": Case(b'{"prompts": []}', "prompts", path=SCORES),
    "46 scores of one token": Case(scored([5]), "prompts.0.token_ids", path=SCORES),
    "46 scores from the first": Case(scored([5, 6], start=0), "prompts.0.start", path=SCORES),
    "46 scores beyond the end": Case(scored([5, 6], start=2), "prompts.0", path=SCORES),
    "46 scores, 21 alternatives": Case(scored([5, 6], top_k=21), "top_k", path=SCORES),
    "46 scores beyond the vocabulary": Case(scored([5, SPEC.vocab_size]), "prompts", path=SCORES),
    "46 scores, 257 prompts": Case(scored(*[[5, 6]] * 257), "prompts", path=SCORES),
    "46 scores, too many": Case(scored(*[[5] * 600] * 128, top_k=20), "prompts", path=SCORES),
    "47 scores beyond the context": Case(
        scored([5] * SPEC.max_context_tokens), "prompts", code="context_length_exceeded", path=SCORES
    ),
    "46 token id beyond 32 bits": Case(b'{"tokens": [4294967296]}', "tokens.0", path="/detokenize"),
    "46 token id beyond the vocabulary": Case(
        orjson.dumps({"tokens": [SPEC.vocab_size]}), "tokens", path="/detokenize"
    ),
    "46 two prompts in a stream": Case(
        with_(COMPLETIONS, prompt=["a", "b"], stream=True), "prompt", code=UNSUPPORTED, path=COMPLETIONS
    ),
    "46 empty prompt of two": Case(with_(COMPLETIONS, prompt=["a", ""]), "prompt.1", path=COMPLETIONS),
    "46 prompt beyond the vocabulary": Case(
        with_(COMPLETIONS, prompt=[SPEC.vocab_size]), "prompt", path=COMPLETIONS
    ),
    "46 negative token id": Case(with_(COMPLETIONS, prompt=[-1]), "prompt.0", path=COMPLETIONS),
    "46 empty prompt": Case(with_(COMPLETIONS, prompt=""), "prompt", path=COMPLETIONS),
    "46 empty input": Case(with_(RESPONSES, input=[]), "input", path=RESPONSES),
    "46 no max_tokens": Case(
        b'{"model":"tiny","messages":[{"role":"user","content":"x"}]}', "max_tokens", path=MESSAGES
    ),
    # Fields that would change the meaning of an answer are refused by name.
    "46 audio": Case(with_(audio={"voice": "x", "format": "wav"}), "audio", code=UNSUPPORTED),
    "46 modalities": Case(with_(modalities=["text", "audio"]), "modalities", code=UNSUPPORTED),
    "46 prediction": Case(with_(prediction={"type": "content", "content": "x"}), "prediction", code=UNSUPPORTED),
    "46 functions": Case(with_(functions=[{"name": "f"}]), "functions", code=UNSUPPORTED),
    "46 function_call": Case(with_(function_call="auto"), "function_call", code=UNSUPPORTED),
    "46 web_search_options": Case(with_(web_search_options={"x": 1}), "web_search_options", code=UNSUPPORTED),
    "46 custom tool": Case(with_(tools=[{"type": "custom", "custom": {"name": "x"}}]), "tools.0", code=UNSUPPORTED),
    "46 image": Case(
        user([{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]),
        "messages.0",
        code=UNSUPPORTED,
    ),
    "46 best_of": Case(with_(COMPLETIONS, best_of=2), "best_of", code=UNSUPPORTED, path=COMPLETIONS),
    "46 echo": Case(with_(COMPLETIONS, echo=True), "echo", code=UNSUPPORTED, path=COMPLETIONS),
    "46 max_tokens of 0": Case(with_(COMPLETIONS, max_tokens=0), "echo", code=UNSUPPORTED, path=COMPLETIONS),
    "46 echo without logprobs": Case(
        with_(COMPLETIONS, max_tokens=0, echo=True), "echo", code=UNSUPPORTED, path=COMPLETIONS
    ),
    "46 suffix": Case(with_(COMPLETIONS, suffix="x"), "suffix", code=UNSUPPORTED, path=COMPLETIONS),
    "46 conversation": Case(with_(RESPONSES, conversation="r"), "conversation", code=UNSUPPORTED, path=RESPONSES),
    # Row 47: lengths; a max_tokens within its bound that exceeds the context is clamped, see below
    "47 prompt beyond the context": Case(user("many words " * 5000), None, code="context_length_exceeded"),
    "47 prompt beyond the context, completions": Case(
        with_(COMPLETIONS, prompt=[5] * 5000), None, code="context_length_exceeded", path=COMPLETIONS
    ),
    "47 prompt beyond the context, responses": Case(
        with_(RESPONSES, input="many words " * 5000), None, code="context_length_exceeded", path=RESPONSES
    ),
    "47 prompt beyond the context, messages": Case(
        with_(MESSAGES, messages=[{"role": "user", "content": "many words " * 5000}]),
        None,
        code="context_length_exceeded",
        path=MESSAGES,
    ),
    "47 max_tokens of 0": Case(with_(max_tokens=0), "max_tokens"),
    "47 max_tokens below 0": Case(with_(max_completion_tokens=-1, max_tokens=None), "max_completion_tokens"),
    "47 max_tokens of 2^31": Case(with_(max_tokens=1 << 31), "max_tokens"),
    "47 two maxima": Case(with_(max_tokens=1, max_completion_tokens=2), "max_tokens"),
    "47 min_tokens above max_tokens": Case(with_(min_tokens=2), "min_tokens"),
    "47 max_tokens of 0, responses": Case(
        with_(RESPONSES, max_output_tokens=0), "max_output_tokens", path=RESPONSES
    ),
    "47 max_tokens of 0, messages": Case(with_(MESSAGES, max_tokens=0), "max_tokens", path=MESSAGES),
    # Row 48: schemas that must not reach a compiler (catastrophic patterns: see below)
    "48 schema that is itself": Case(answering({"$ref": "#"}), SCHEMA),
    "48 schemas in a circle": Case(
        answering({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}), SCHEMA
    ),
    "48 schema from elsewhere": Case(answering({"$ref": "http://169.254.169.254/"}), SCHEMA),
    "48 schema from a file": Case(answering({"$ref": "file:///etc/passwd"}), SCHEMA),
    "48 schema that leads nowhere": Case(answering({"$ref": "#/$defs/none"}), SCHEMA),
    "48 schema of 10 MB": Case(answering({"description": "x" * 10_000_000}), SCHEMA),
    "48 schema 120 deep": Case(answering(nested(60)), SCHEMA),
    "48 pattern of 100,000 characters": Case(answering({"type": "string", "pattern": "(a+)+" * 20_000}), SCHEMA),
    "48 tool's schema that is itself": Case(with_(tools=[tool(parameters={"$ref": "#"})]), "tools.0.function"),
    "48 tool's schema of 10 MB": Case(
        with_(tools=[tool(parameters={"description": "x" * 10_000_000})]), "tools.0.function"
    ),
    "48 unknown format": Case(with_(response_format={"type": "regex", "regex": "(a+)+$"}), "response_format"),
    # Row 50: unknown names
    "50 unknown model": Case(with_(model="gpt-9"), "model", 404, "model_not_found"),
    "50 unknown model, completions": Case(
        with_(COMPLETIONS, model="gpt-9"), "model", 404, "model_not_found", COMPLETIONS
    ),
    "50 unknown model, responses": Case(with_(RESPONSES, model="g"), "model", 404, "model_not_found", RESPONSES),
    "50 unknown model, messages": Case(with_(MESSAGES, model="g"), "model", 404, "model_not_found", MESSAGES),
    "50 model of 1 MB": Case(with_(model="x" * 1_000_000), "model"),
    "50 no model": Case(b'{"messages":[{"role":"user","content":"x"}]}', "model"),
    "50 unknown session": Case(with_(), "session_id", 404, "session_not_found", f"/sessions/nobody{CHAT}"),
    "50 unknown session, responses": Case(
        with_(RESPONSES), "session_id", 404, "session_not_found", f"/sessions/nobody{RESPONSES}"
    ),
    "50 unknown session, messages": Case(
        with_(MESSAGES), "session_id", 404, "session_not_found", f"/sessions/nobody{MESSAGES}"
    ),
    "50 unknown session, reward": Case(
        b'{"reward": 1}', "session_id", 404, "session_not_found", "/sessions/nobody/reward"
    ),
    "50 unknown session, finish": Case(b"{}", "session_id", 404, "session_not_found", "/sessions/nobody/finish"),
    # Row 59: templates from clients
    "59 chat_template": Case(with_(chat_template="{% for i in range(10**9) %}x{% endfor %}"), "chat_template"),
    "59 chat_template_kwargs": Case(with_(chat_template_kwargs={"tokenize": True}), "chat_template_kwargs"),
    "59 custom_logit_processor": Case(with_(custom_logit_processor="x"), "custom_logit_processor"),
    "59 documents": Case(with_(documents=[{}]), "documents"),
    "59 template to tokenize with": Case(
        orjson.dumps({"messages": [USER], "chat_template": "x"}), "chat_template", path="/tokenize"
    ),
    "59 template to render with": Case(
        with_(f"{CHAT}/render", chat_template="x"), "chat_template", path=f"{CHAT}/render"
    ),
}


@pytest.fixture(scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChatService]:
    """One service for the whole table: refused requests must leave no trace in it."""
    async with chat_service(tmp_path_factory.mktemp("bad-input")) as service:
        yield service
        for path in GOOD:
            assert (await service.call("POST", path, json=GOOD[path]))[0] == 200


async def check_refused(service: ChatService, case: Case, headers: dict[str, str] = JSON) -> None:
    before = service.sessions.num_open
    answered = await service.call("POST", case.path, data=BytesIO(case.body), headers=headers)
    status, error = answered[0], answered[1]["error"]
    assert (status, error["code"]) == (case.status, case.code), (case.path, error)
    assert (error["param"] or "").startswith(case.param or ""), (case.path, error)
    assert case.param is None or len(error["param"]) <= 300
    assert "Traceback" not in error["message"]
    assert "site-packages" not in error["message"]
    if case.code != "context_length_exceeded":  # known only after a session has rendered the prompt
        assert service.sessions.num_open == before, case.path


@pytest.mark.parametrize("path", GOOD)
async def test_the_good_bodies_are_good(service: ChatService, path: str) -> None:
    assert (await service.call("POST", path, json=GOOD[path]))[0] == 200


@pytest.mark.parametrize("name", NOT_JSON)
async def test_what_is_no_json(service: ChatService, name: str) -> None:
    for path in GOOD:
        await check_refused(service, Case(NOT_JSON[name], path=path))


@pytest.mark.parametrize("name", CASES)
async def test_bad_bodies(service: ChatService, name: str) -> None:
    await check_refused(service, CASES[name])


@pytest.mark.parametrize(
    "media",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json; charset=utf-16"},
        {"content-type": "multipart/form-data; boundary=x"},
    ],
)
async def test_40_the_wrong_media_type_is_named(service: ChatService, media: dict[str, str]) -> None:
    for path in GOOD:
        case = Case(with_(path), "content-type", 400, "invalid_request", path)
        await check_refused(service, case, {"content-type": "", **media})


async def test_44_of_duplicate_names_the_last_counts(service: ChatService) -> None:
    body = raw("max_tokens", "3")
    status, answer, _ = await service.call("POST", CHAT, data=body, headers=JSON)
    assert (status, answer["usage"]["completion_tokens"] <= 3) == (200, True)
    wrong_first = b'{"model": "gpt-9", ' + with_()[1:]
    assert (await service.call("POST", CHAT, data=wrong_first, headers=JSON))[0] == 200


async def test_44_nul_and_control_characters_pass_exactly(service: ChatService) -> None:
    text = "a\x00b\x07\x1b[31m\u2028\ufeff\U0001f600<|im_end|>"
    asked = {**GOOD[CHAT], "messages": [{"role": "user", "content": text}], "session": "nul"}
    assert (await service.call("POST", CHAT, json=asked))[0] == 200
    [record] = (await service.call("GET", "/sessions/nul/trajectories"))[1]
    assert record["paths"][0]["messages"][0]["content"] == text
    _, tokens, _ = await service.call("POST", "/tokenize", json={"messages": asked["messages"]})
    assert tokens["tokens"] == record["paths"][0]["prompt_ids"]
    assert text in RENDERER.decode(tokens["tokens"])


async def test_46_what_is_harmless_is_accepted(service: ChatService) -> None:
    harmless = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "verbosity": "low",
        "reasoning_effort": "low",
        "modalities": ["text"],
        "functions": None,
        "audio": None,
        "stream_options": None,
        "tools": None,
        "stop": None,
        "logit_bias": None,
        "seed": -1,
        "top_p": 0,
    }
    assert (await service.call("POST", CHAT, json={**GOOD[CHAT], **harmless}))[0] == 200


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_47_more_than_the_context_holds_is_clamped(service: ChatService, field: str) -> None:
    """A max_tokens within the bound of the field means at most the rest of the context."""
    asked = {
        "model": MODEL,
        "messages": [USER],
        field: 1 << 20,
        "logit_bias": {"2": -100},
        "return_token_ids": True,
    }
    status, answer, _ = await service.call("POST", CHAT, json=asked)
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
    assert answer["usage"]["total_tokens"] == SPEC.max_context_tokens


async def test_48_a_pattern_that_is_catastrophic_to_match_does_not_hold_up_others(service: ChatService) -> None:
    """The endpoint does not match a client's pattern.

    It passes short patterns on, and the engine compiles them in time or returns 400. The simulated engine accepts
    any pattern.
    """
    body = orjson.loads(answering({"type": "string", "pattern": "(a+)+$"}))
    assert (await service.call("POST", CHAT, json=body))[0] == 200
