"""The logprobs of a step leave vLLM's engine process as one array, and each request receives its own."""

import importlib.util

import numpy as np
import pytest
from vllm.logprobs import FlatLogprobs
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from agentloop_servers.engines.vllm.step_logprobs import StepLogprobs, append_rows, unpack

pytestmark = pytest.mark.engine


def vllms_own_processor():
    """Return vLLM's LogprobsProcessor without the effect of `install`, which another test may have called."""
    spec = importlib.util.find_spec("vllm.v1.engine.logprobs")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.LogprobsProcessor


LogprobsProcessor = vllms_own_processor()


class RunnerOutput:
    def __init__(self, logprobs):
        self.logprobs = logprobs


class VllmScheduler:
    """Slices a step's logprobs for its requests as vLLM's scheduler does."""

    def update_from_output(self, requests, runner_output):
        outputs = []
        for index, (wants_logprobs, token_ids) in enumerate(requests):
            logprobs = runner_output.logprobs
            own = logprobs.slice_request(index, len(token_ids)) if wants_logprobs and logprobs else None
            outputs.append(EngineCoreOutput(f"r{index}", token_ids, new_logprobs=own))
        return {0: EngineCoreOutputs(outputs=outputs)}


class Scheduler(StepLogprobs, VllmScheduler):
    pass


def lists(num_rows, width, cu_num_generated_tokens=None):
    ids = np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width) + 1000
    return LogprobsLists(
        ids, -ids.astype(np.float32) / 7, np.arange(num_rows, dtype=np.int32), cu_num_generated_tokens
    )


def received(outputs):
    """Encode and decode as between vLLM's processes, then unpack."""
    decoded = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs))
    unpack(decoded.outputs)
    return decoded.outputs


def appended(outputs, num_logprobs, append):
    """Return the state of a request's processor after these logprobs."""
    processor = LogprobsProcessor(
        tokenizer=None,
        logprobs=FlatLogprobs(),
        prompt_logprobs=None,
        cumulative_logprob=0.0,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=None,
    )
    append(processor, outputs)
    return processor.logprobs, processor.cumulative_logprob


@pytest.mark.parametrize("num_logprobs", [0, 1, 3])
@pytest.mark.parametrize(
    ("requests", "firsts"),
    [
        ([(True, [1]), (False, [2]), (True, [3])], None),
        ([(False, [1]), (True, [2]), (False, [3])], None),
        # a draft of the first request was rejected
        ([(True, [1, 2, 3]), (False, [4, 5]), (True, [6])], [0, 4, 6, 7]),
        ([(False, [1])], None),
        ([], None),
    ],
)
def test_each_request_gets_the_logprobs_that_vllm_would_send(requests, firsts, num_logprobs):
    width = 4
    step = lists(7, width, firsts)
    theirs = VllmScheduler().update_from_output(requests, RunnerOutput(step))[0].outputs
    packed = Scheduler().update_from_output(requests, RunnerOutput(step))[0]
    outputs = received(packed)
    assert len(outputs) == len(requests)
    for own, expected in zip(outputs, theirs, strict=True):
        expected_logprobs = appended(expected, num_logprobs, LogprobsProcessor.update_from_output)
        assert appended(own, num_logprobs, update_as_ours) == expected_logprobs
        assert own.new_token_ids == expected.new_token_ids


def update_as_ours(processor, output):
    if output.new_logprobs is not None:
        append_rows(processor, output.new_logprobs)


def test_a_step_without_logprobs_is_left_alone():
    requests = [(True, [1])]
    assert received(Scheduler().update_from_output(requests, RunnerOutput(None))[0])[0].new_logprobs is None
