"""Validation of requests, generations and weight folders, shared by all engine adapters.

The functions do not modify their arguments; they raise instead of repairing.
"""

from __future__ import annotations

import ipaddress
import math
from array import array
from itertools import pairwise
from pathlib import Path

import numpy as np
import orjson

from agentloop.engine.interface import Delta, EngineInfo
from agentloop.errors import (
    CheckpointUnreadable,
    ContextLengthExceeded,
    InvalidRequest,
    MalformedEngineResponse,
    ModelNotFound,
    UnsupportedParameter,
)
from agentloop.types import FinishReason, GenerateRequest, Generation, SamplingParams, tiling_problem
from agentloop.values.aux_rows import AuxKind, mask_lacks
from agentloop.values.capabilities import CONSTRAINTS, features_asked, features_of, hint_of, param_of
from agentloop.values.sampling import LogprobsMode

LOGPROB_TOLERANCE = 1e-3
"""The logprob of a near-certain token can round to slightly above 0 in an engine's arithmetic."""

LOGPROB_SENTINEL = -9999.0
"""The value that engines write for a missing logprob. Values at or below it are not logprobs."""

MAX_TOP_LOGPROBS = 20
"""Maximum alternatives per token: the default of `engine.max_logprobs`, and the limit of the chat formats."""

MAX_ALTERNATIVES = 1 << 20
"""Limit of the number of alternatives per token in a body; the engine's own limit is smaller."""

MAX_VOCAB_SIZE = 1 << 31
"""The limit of token ids if the model's vocabulary size is unknown: ids are stored as int32."""

MIN_TEMPERATURE = 0.01
"""The smallest temperature above 0. vLLM raises smaller values to this one, which would make the record wrong."""

MAX_TEMPERATURE = 100.0
MAX_CHAT_TEMPERATURE = 2.0  # the limit of the OpenAI and Anthropic APIs
MAX_TOP_K = (1 << 31) - 1
MAX_SEED = (1 << 63) - 1
MAX_CHAT_SEED = 1 << 62  # limit for choice 0: the seeds of the other choices are larger
MAX_LOGIT_BIASES = 1024
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY = 0.1
MAX_REPETITION_PENALTY = 10.0
MAX_CONSTRAINT_CHARS = 1 << 16

_MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit


def _are_below(bound: int, ids: tuple[int, ...]) -> bool:
    """Return True if all ids are in [0, bound). Twice as fast as `min` and `max`."""
    try:
        packed = np.frombuffer(array("q", ids), np.int64)
    except OverflowError:
        return False
    return bool(packed.min() >= 0 and packed.max() < bound)


def check_request(request: GenerateRequest, info: EngineInfo) -> None:
    """Raise InvalidRequest (naming the field) or ContextLengthExceeded if the engine cannot serve this request."""
    ids = request.token_ids
    if not ids:
        raise InvalidRequest("the prompt is empty", param="token_ids")
    if not _are_below(info.vocab_size, ids):
        bad = next(token_id for token_id in ids if not 0 <= token_id < info.vocab_size)
        raise InvalidRequest(f"token id {bad} is outside [0, {info.vocab_size})", param="token_ids")
    if len(ids) + 1 > info.max_context_tokens:
        raise ContextLengthExceeded(
            f"a prompt of {len(ids)} tokens leaves no room in a context of {info.max_context_tokens}",
            param="token_ids",
        )
    if request.adapter and info.max_loras is None:
        raise ModelNotFound(
            f"unknown adapter {request.adapter!r}: the engine ({info.name}) does not serve adapters by name",
            param="model",
        )
    _check_images(request, info)
    start = request.sampling.score_from
    if start is not None and not 1 <= start < len(ids):
        raise InvalidRequest(f"start is {start}, not in [1, {len(ids)})", param="start")
    check_sampling(
        request.sampling,
        info.vocab_size,
        features=info.can.features,
        engine=info.name,
        max_logprobs=info.max_logprobs,
    )


def _check_images(request: GenerateRequest, info: EngineInfo) -> None:
    if not request.images:
        return
    if not info.takes_images:
        raise UnsupportedParameter(f"the engine ({info.name}) takes no images", param="images")
    known, end = {image.sha256 for image in request.image_data}, 0
    for span in request.images:
        if not end <= span.start < span.end <= len(request.token_ids):
            raise InvalidRequest(
                f"the image span [{span.start}, {span.end}) must be within [{end}, {len(request.token_ids)}), after"
                " the previous image and inside the prompt",
                param="images",
            )
        if span.sha256 not in known:
            raise InvalidRequest(f"the image {span.sha256} did not come with the request", param="image_data")
        end = span.end


def check_sampling(
    sampling: SamplingParams,
    vocab_size: int,
    *,
    features: int,
    engine: str,
    max_logprobs: int = MAX_TOP_LOGPROBS,
) -> None:
    """Validate the sampling options of a request. `features` are the engine's, as returned by `bits_of`.

    Raises InvalidRequest (naming the field), and UnsupportedParameter for a missing feature.
    """
    _check_numbers(sampling)
    check_num_top(sampling.num_top_logprobs, max_logprobs, "num_top_logprobs")
    _check_adjustments(sampling, vocab_size)
    _check_features(features_asked(sampling) & ~features, engine)
    _check_constraint(sampling)


def check_num_top(num_top: int, max_logprobs: int, param: str) -> None:
    """Raise InvalidRequest if a request wants more alternatives per token than the engines return."""
    if not 0 <= num_top <= max_logprobs:
        raise InvalidRequest(
            f"{param} is {num_top}, not in [0, {max_logprobs}]: the limit is engine.max_logprobs", param=param
        )


def _check_numbers(sampling: SamplingParams) -> None:
    if sampling.max_tokens <= 0:
        raise InvalidRequest(f"max_tokens is {sampling.max_tokens}, not positive", param="max_tokens")
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise InvalidRequest(f"temperature is {sampling.temperature}, not >= 0", param="temperature")
    if 0 < sampling.temperature < MIN_TEMPERATURE:
        raise InvalidRequest(
            f"temperature is {sampling.temperature}, neither 0 nor >= {MIN_TEMPERATURE:g}", param="temperature"
        )
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequest(f"top_p is {sampling.top_p}, not in (0, 1]", param="top_p")
    if sampling.top_k < 0:
        raise InvalidRequest(f"top_k is {sampling.top_k}, not >= 0", param="top_k")
    if not 0 <= sampling.min_p <= 1:
        raise InvalidRequest(f"min_p is {sampling.min_p}, not in [0, 1]", param="min_p")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise InvalidRequest(f"min_tokens is {sampling.min_tokens}, not in [0, max_tokens]", param="min_tokens")


def _check_adjustments(sampling: SamplingParams, vocab_size: int) -> None:
    for name in ("frequency_penalty", "presence_penalty"):
        if not -MAX_PENALTY <= getattr(sampling, name) <= MAX_PENALTY:
            raise InvalidRequest(
                f"{name} is {getattr(sampling, name)}, not in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}]", param=name
            )
    if not MIN_REPETITION_PENALTY <= sampling.repetition_penalty <= MAX_REPETITION_PENALTY:
        raise InvalidRequest(
            f"repetition_penalty is {sampling.repetition_penalty}, "
            f"not in [{MIN_REPETITION_PENALTY:g}, {MAX_REPETITION_PENALTY:g}]",
            param="repetition_penalty",
        )
    if len(sampling.logit_bias) > MAX_LOGIT_BIASES:
        raise InvalidRequest(
            f"logit_bias has {len(sampling.logit_bias)} token ids, more than {MAX_LOGIT_BIASES}", param="logit_bias"
        )
    if len({token_id for token_id, _ in sampling.logit_bias}) != len(sampling.logit_bias):
        raise InvalidRequest("logit_bias has a token id twice", param="logit_bias")
    for token_id, bias in sampling.logit_bias:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"token id {token_id} is outside [0, {vocab_size})", param="logit_bias")
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise InvalidRequest(f"a bias of {bias} is not in [-{MAX_BIAS:g}, {MAX_BIAS:g}]", param="logit_bias")


def _check_features(missing: int, engine: str) -> None:
    for feature in features_of(missing):
        if feature in CONSTRAINTS:
            reason = f"the engine ({engine}) does not support constraints of kind {feature}"
        else:
            reason = f"the engine ({engine}) does not support {feature}{hint_of(feature)}"
        raise UnsupportedParameter(reason, param=param_of(feature))


def _check_constraint(sampling: SamplingParams) -> None:
    if sampling.constraint is None:
        return
    if len(sampling.constraint.text) > MAX_CONSTRAINT_CHARS:
        raise InvalidRequest(
            f"the constraint has {len(sampling.constraint.text)} characters, more than {MAX_CONSTRAINT_CHARS}",
            param="constraint",
        )
    # A matching text can be shorter than min_tokens, and only a stop token ends it.
    if sampling.min_tokens:
        raise InvalidRequest("min_tokens and a constraint exclude each other", param="min_tokens")
    if not sampling.stop_token_ids:
        raise InvalidRequest("a constraint requires a stop token: stop_token_ids is empty", param="stop_token_ids")


def room_tokens(request: GenerateRequest, info: EngineInfo) -> int:
    """Return the number of tokens that a checked request may sample: `max_tokens`, limited by the rest of the
    context."""
    return min(request.sampling.max_tokens, info.max_context_tokens - len(request.token_ids))


_MAY_BE_EMPTY = (FinishReason.ABORT, FinishReason.DEADLINE, FinishReason.REPLACED)


def check_generation(request: GenerateRequest, generation: Generation, vocab_size: int) -> None:
    """Raise MalformedEngineResponse if a generation is not a valid answer to `request`. It must not be stored
    then."""
    problem = _answer_problem(request, generation) or _token_problem(request, generation, vocab_size)
    _raise(request, problem or _aux_problem(request, generation, is_complete=True))


def check_piece(request: GenerateRequest, piece: Delta, vocab_size: int) -> None:
    """Raise MalformedEngineResponse if a piece cannot be part of an answer to `request`. A piece may be empty."""
    problem = _token_problem(request, piece, vocab_size)
    _raise(request, problem or _aux_problem(request, piece, is_complete=False))


def _raise(request: GenerateRequest, problem: str | None) -> None:
    if problem is not None:
        raise MalformedEngineResponse(f"request {request.request_id}: {problem}")


def _answer_problem(request: GenerateRequest, generation: Generation) -> str | None:
    ids = generation.token_ids
    if generation.request_id != request.request_id:
        return f"the answer is for {generation.request_id}"
    if not ids and generation.finish_reason not in _MAY_BE_EMPTY:
        return "no tokens"
    if ids and generation.finish_reason is FinishReason.STOP and ids[-1] not in request.sampling.stop_token_ids:
        return f"it stopped at {ids[-1]}, which is not a stop token"
    start = request.sampling.score_from
    if start is not None and ids and (ids != request.token_ids[start:] or len(generation.weight_versions) > 1):
        return "its scores are for other token ids than the prompt's, or have several weight versions"
    if ids and not 0 <= generation.cached_tokens <= len(request.token_ids):
        return f"{generation.cached_tokens} cached tokens of a prompt of {len(request.token_ids)}"
    return None


def _token_problem(request: GenerateRequest, piece: Delta | Generation, vocab_size: int) -> str | None:
    ids, logprobs = piece.token_ids, piece.logprobs
    if len(ids) != len(logprobs):
        return f"{len(ids)} ids but {len(logprobs)} logprobs"
    if request.sampling.score_from is None and len(ids) > request.sampling.max_tokens:
        return f"{len(ids)} tokens where {request.sampling.max_tokens} were allowed"
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        return f"a token id is outside [0, {vocab_size})"
    # NaN fails here, too, because every comparison with it is False; so do both infinities.
    if not all(LOGPROB_SENTINEL < logprob <= LOGPROB_TOLERANCE for logprob in logprobs):
        return "a logprob is not a finite number <= 0"
    if len(piece.raw_logprobs) != (len(ids) if piece.logprobs_mode is LogprobsMode.BOTH else 0):
        return f"{len(ids)} ids but {len(piece.raw_logprobs)} raw logprobs in mode {piece.logprobs_mode}"
    if not all(LOGPROB_SENTINEL < logprob <= LOGPROB_TOLERANCE for logprob in piece.raw_logprobs):
        return "a raw logprob is not a finite number <= 0"
    return _span_problem(piece) or _top_problem(request, piece, vocab_size)


def _top_problem(request: GenerateRequest, piece: Delta | Generation, vocab_size: int) -> str | None:
    num_wanted, tops = request.sampling.num_top_logprobs, piece.top_logprobs
    if len(tops) != (len(piece.token_ids) if num_wanted else 0):
        return f"alternatives for {len(tops)} of {len(piece.token_ids)} tokens"
    for top in tops:
        if not 0 < len(top) <= num_wanted:
            return f"{len(top)} alternatives where {num_wanted} were wanted"
        if not all(0 <= token_id < vocab_size for token_id, _ in top):
            return f"an alternative's id is outside [0, {vocab_size})"
        if not all(LOGPROB_SENTINEL < logprob <= LOGPROB_TOLERANCE for _, logprob in top):
            return "an alternative's logprob is not a finite number <= 0"
        if any(second > first for (_, first), (_, second) in pairwise(top)):
            return "alternatives are not in order, best first"
    return None


def _aux_problem(request: GenerateRequest, piece: Delta | Generation, *, is_complete: bool) -> str | None:
    """Return the reason why auxiliary rows do not belong to the tokens. A piece may be part of an answer."""
    if piece.aux is None:
        return None
    num_ids = len(piece.token_ids)
    if not num_ids or request.sampling.score_from is not None:
        return "auxiliary rows without a sampled token"
    for kind, rows in piece.aux.items():
        first, end = kind.span(request.routes_from, len(request.token_ids), num_ids)
        if rows.problem is not None:
            return f"{kind} has {rows.problem} for rows of shape {rows.shape}"
        if is_complete and (rows.start, rows.end) != (first, end):
            return f"{kind} has the positions [{rows.start}, {rows.end}) where [{first}, {end}) are expected"
        if kind is AuxKind.SAMPLING_MASK and mask_lacks(rows, piece.token_ids):
            return f"{kind} has a row without the sampled id, or {rows.num_rows} rows for {num_ids} ids"
    return None


def _span_problem(piece: Delta | Generation) -> str | None:
    spans = piece.weight_versions
    for before, span in pairwise(spans):
        if span.version < before.version:
            return f"weight version {span.version} after {before.version}"
    return tiling_problem(spans, len(piece.token_ids))


def check_checkpoint(directory: str) -> tuple[Path, ...]:
    """Return the safetensors files of a folder in sorted order, after checking each header against its file's size.

    Raises CheckpointUnreadable. Reads the headers only and does not check the values.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise CheckpointUnreadable(f"{folder.name} is not a folder that exists on this host", param="directory")
    files = tuple(sorted(folder.glob("*.safetensors")))
    if not files:
        raise CheckpointUnreadable(f"{folder.name} has no safetensors file", param="directory")
    for path in files:
        _check_header(path)
    return files


def _check_header(path: Path) -> None:
    """Check the header of a safetensors file.

    The format is 8 bytes with the header length (little-endian), a JSON object with the tensors, then their bytes.
    """
    try:
        with path.open("rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
            if num_bytes > _MAX_HEADER_BYTES:
                raise CheckpointUnreadable(f"{path.name}: no safetensors header", param="directory")
            header = orjson.loads(file.read(num_bytes))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        file_bytes = path.stat().st_size
        if max(ends, default=0) != file_bytes - 8 - num_bytes:
            raise CheckpointUnreadable(
                f"{path.name} has {file_bytes} bytes, but its header describes"
                f" {8 + num_bytes + max(ends, default=0)}: the file is cut off or has extra bytes",
                param="directory",
            )
    except (OSError, orjson.JSONDecodeError, AttributeError, KeyError, IndexError, TypeError) as error:
        raise CheckpointUnreadable(f"{path.name}: no safetensors header: {error}", param="directory") from error


def is_loopback(host: str) -> bool:
    """Return True if `host` is localhost or a loopback address. Other host names can resolve to any machine."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def is_address(host: str) -> bool:
    """Return True if `host` is an IP address, not a host name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
