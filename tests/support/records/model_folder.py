"""A small model folder: byte-level BPE with tokens like Qwen's, and templates that differ like real ones."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from agentloop.rendering.port import TurnEnd
from agentloop.rendering.renderer import TemplateRenderer
from agentloop.testing.stand_in import TEMPLATE
from agentloop.types import Message, ToolCall

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
STOP, BACKUP_STOP = "<|im_end|>", "<|endoftext|>"

# Qwen3's behavior: reasoning is kept within a tool cycle, and dropped after the next user message.
STRIPS_THINKING = TEMPLATE.replace(
    "{{- '<|im_start|>assistant\\n' + message.content }}",
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{{- message.content if loop.index0 > ns.last else message.content.split('</think>')[-1].lstrip('\\n') }}",
)
# A common form: the last assistant message is written differently from earlier ones.
FORGETS_EARLIER = TEMPLATE.replace(
    "{{- '<|im_start|>assistant\\n' + message.content }}",
    "{{- '<|im_start|>assistant\\n' + (message.content if loop.revindex <= 3 else 'omitted') }}",
)
WITHOUT_TOOLS = """
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
IGNORES_TOOLS = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
NO_STOP = IGNORES_TOOLS.replace("<|im_end|>", "")

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate an expression, exactly.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]


@functools.cache
def trained_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    sentences = [
        "What is 37 * 12 + 5? The answer is 449, and the tool said so.",
        '{"name": "calculator", "arguments": {"expression": "37 * 12 + 5"}}\nsystem user assistant tool',
        "im_start im_end tool_call tool_response think endoftext <tool_call> </tool_response> <|im_end|>",
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(sentences * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    tokenizer.add_tokens([AddedToken("    ", special=False, normalized=False)])  # vocabulary, not a control token
    return tokenizer


def write_folder(folder: Path, template: str | None = TEMPLATE) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer = trained_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    stops = [tokenizer.token_to_id(STOP), tokenizer.token_to_id(BACKUP_STOP)]
    (folder / "config.json").write_text(json.dumps({"vocab_size": 512, "eos_token_id": stops[1]}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    config = {"eos_token": STOP, "bos_token": None, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def call(text: Any, index: int = 0) -> ToolCall:
    return ToolCall(f"call_0_{index}", "calculator", {"expression": text})


def grown(renderer: TemplateRenderer, messages: list[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the conversation's ids as in a rollout: a first prompt, then sampled ids and bridges."""
    turns = [i for i, message in enumerate(messages) if message.role == "assistant"]
    ids = renderer.render(messages[: turns[0]] if turns else messages, tools)
    for number, turn in enumerate(turns):
        following = turns[number + 1] if number + 1 < len(turns) else len(messages)
        prompt, extended = renderer.text(messages[:turn], tools), renderer.text(messages[: turn + 1], tools)
        sampled = extended[len(prompt) :].rsplit(STOP, 2)[0]
        is_closed = number % 2 == 0
        ids += renderer.ids(sampled + STOP if is_closed else sampled)
        end = TurnEnd(renderer.stop_token_ids[0] if is_closed else None)
        ids += renderer.bridge(messages[turn + 1 : following], tools, end)
    return ids
