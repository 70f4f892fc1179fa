"""The shipped policy: complete folders, a template that the service can use, and correct held-out tasks."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
import transformers
from safetensors import safe_open

from agentloop.client.rollout import load_tasks
from agentloop.errors import ToolError
from agentloop.rendering.renderer import TemplateRenderer
from agentloop.rollout import exact_match
from agentloop.types import RolloutTask
from agentloop.values.codec import from_builtins
from agentloop_tools.calculator import evaluate
from agentloop_tools.python import PythonTool
from examples.tiny_policy import measure
from examples.tiny_policy import tasks as generator

POLICY = Path(generator.__file__).parent
TASKS_FILE = POLICY.parent / "data" / "tasks.jsonl"
VERSIONS = ("v0", "v1")


def tensors(version):
    with safe_open(POLICY / version / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping


def held_out_problems(num_problems):
    """Return the first distinct held-out problems, the source of `tasks.jsonl`."""
    distinct = {}
    for problem in generator.problems(1, held_out=True):
        distinct.setdefault(problem.question, problem)
        if len(distinct) == num_problems:
            return distinct


def training_problems(num_problems):
    return list(islice(generator.problems(5, held_out=False), num_problems))


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(POLICY / "v1")


def test_the_policy_is_at_most_10_mb():
    folders = (POLICY, *(POLICY / version for version in VERSIONS))
    files = [file for folder in folders for file in folder.iterdir() if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 10_000_000


@pytest.mark.parametrize("version", VERSIONS)
def test_a_folder_loads(version):
    config = transformers.AutoConfig.from_pretrained(POLICY / version)
    loaded = transformers.AutoTokenizer.from_pretrained(POLICY / version)
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert config.tie_word_embeddings
    assert loaded.is_fast
    assert len(loaded) == config.vocab_size
    assert loaded.eos_token == "<|im_end|>"
    assert loaded.pad_token == "<|endoftext|>"
    assert config.eos_token_id == loaded.eos_token_id


@pytest.mark.parametrize("version", VERSIONS)
def test_the_weights_are_the_model_s_with_tied_embeddings(version):
    transformers.utils.logging.disable_progress_bar()
    folder = POLICY / version
    model, report = transformers.Qwen3ForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    assert "lm_head.weight" not in tensors(version)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_the_versions_differ_in_weights_only():
    old, new = map(tensors, VERSIONS)
    assert old.keys() == new.keys()
    assert not any(old[name].equal(new[name]) for name in old)
    for file in (POLICY / "v0").iterdir():
        if file.suffix != ".safetensors":
            assert file.read_bytes() == (POLICY / "v1" / file.name).read_bytes()


@pytest.mark.parametrize(
    "text", ["", "a  b\n\n\tc ", "h\u00e9llo \u65e5\u672c\u8a9e \U0001f642", "x\x00\x7f\r\n", "84 \u00d7 3 = 252."]
)
def test_any_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_are_tokens_of_their_own(tokenizer):
    assert [tokenizer.decode([i]) for i in tokenizer.encode("is 4096.")][1:] == ["4", "0", "9", "6", "."]


def test_every_dialogue_is_a_chain_of_prefixes(tokenizer):
    """A prompt and its answer are a prefix of the next prompt, as text and as ids."""
    for problem in training_problems(200):
        messages = generator.dialogue(problem)
        definitions = [generator.DEFINITIONS[name] for name in problem.tools]
        before_text, before_ids = "", []
        for end in range(1, len(messages) + 1):
            is_prompt = messages[end - 1]["role"] != "assistant"
            text = tokenizer.apply_chat_template(
                messages[:end], tools=definitions, tokenize=False, add_generation_prompt=is_prompt
            )
            ids = tokenizer.encode(text)
            assert text.startswith(before_text)
            assert ids[: len(before_ids)] == before_ids
            before_text, before_ids = text, ids


def test_parallel_results_share_one_user_turn(tokenizer):
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Both."},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    response = "\n<tool_response>\n{}\n</tool_response>"
    assert text.endswith(f"<|im_start|>user{response.format(1)}{response.format(2)}<|im_end|>\n")


def test_the_service_can_use_the_template():
    renderer = TemplateRenderer.from_directory(POLICY / "v0")
    assert renderer.facts.user_turns is None
    assert renderer.facts.supports_tools
    assert renderer.decode(renderer.stop_token_ids[:1]) == "<|im_end|>"


def test_every_dialogue_fits_the_context(tokenizer):
    context = transformers.AutoConfig.from_pretrained(POLICY / "v1").max_position_embeddings
    for problem in training_problems(300):
        definitions = [generator.DEFINITIONS[name] for name in problem.tools]
        text = tokenizer.apply_chat_template(generator.dialogue(problem), tools=definitions, tokenize=False)
        assert len(tokenizer.encode(text)) < context / 2


def test_the_shipped_tasks_are_rollout_tasks():
    lines = TASKS_FILE.read_text(encoding="utf-8").splitlines()
    tasks = [from_builtins(json.loads(line), RolloutTask) for line in lines]
    assert len(tasks) >= 200
    assert load_tasks(TASKS_FILE) == tasks
    families = Counter(task.task_id.rsplit("-", 1)[0] for task in tasks)
    assert families.keys() == {maker.__name__ for maker, _ in generator.FAMILIES}
    assert min(families.values()) >= 8


def test_the_references_are_what_the_tools_answer():
    tasks = load_tasks(TASKS_FILE)
    problems = held_out_problems(len(tasks))
    for task in tasks:
        problem = problems[task.messages[0].content]
        assert task.reference == problem.answer
        assert task.tools == problem.tools
        for call in problem.calls:
            if call.tool == "calculator":
                assert call.response == calculated(call.argument)
        assert problem.calls[-1].response.strip("'") == task.reference


async def test_the_python_answers_are_what_the_tool_says():
    tool = PythonTool(num_workers=1)
    session = tool.open_session("t", 0)
    try:
        calls = [call for problem in held_out_problems(256).values() for call in problem.calls]
        python_calls = [call for call in calls if call.tool == "python"]
        assert len(python_calls) >= 20
        for call in python_calls:
            assert await session.call({"code": call.argument}) == call.response
    finally:
        await session.close()
        await tool.close()


def calculated(expression):
    try:
        return evaluate(expression)
    except ToolError as error:
        return f"Error: {error}"


def test_training_never_sees_a_shipped_question():
    shipped = {task.messages[0].content for task in load_tasks(TASKS_FILE)}
    assert all(generator.is_held_out(question) for question in shipped)
    trained = {problem.question for problem in training_problems(5_000)}
    assert not any(generator.is_held_out(question) for question in trained)
    assert not shipped & trained


def test_every_recovery_meets_a_real_error():
    recoveries = [problem for problem in training_problems(500) if problem.family == "recovery"]
    assert len(recoveries) > 50
    for problem in recoveries:
        assert problem.calls[0].response.startswith("Error: not an arithmetic expression")
        assert not problem.calls[1].response.startswith("Error")


async def test_the_last_version_solves_held_out_tasks_as_measured_by_the_example():
    samples = await measure.roll_out(POLICY / "v1", load_tasks(TASKS_FILE)[:4], temperature=0.0)
    assert all(sample.outcome == "answered" and sample.num_turns > 1 for sample in samples)
    assert all(exact_match(sample.task, sample.messages) == 1.0 for sample in samples)
