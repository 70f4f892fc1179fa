"""A tiny model folder that reads images, without weights: Idefics3 (a vision transformer over a Llama).

It is a real family whose processor does not need torchvision. Larger images take more tokens, and the vision part
does not fill all of them: tiles are named by their row and column, and rows end with a line break. The tokenizer
spells every byte; the template is ChatML with tools, and one placeholder per image.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from PIL import Image as Picture
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from agentloop.images import Image, image_of

PLACEHOLDER = "<image>"
CONTEXT_TOKENS = 512
_TILE = 56  # pixels per side that the vision part reads at once: 4 x 4 patches, which make 4 tokens
_MAX_TILES = 3  # per side
_ADDED = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    PLACEHOLDER,
    "<fake_token_around_image>",
    "<end_of_utterance>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)

TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<image>' }}{% else %}{{- part.text }}{% endif %}
{%- endfor %}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""


def write_vision_folder(folder: Path) -> Path:
    """Write the folder, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    end, pad, image = (tokenizer.token_to_id(text) for text in ("<|im_end|>", "<|endoftext|>", PLACEHOLDER))
    _write_json(folder / "config.json", _config(tokenizer.get_vocab_size(), end, pad, image))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "additional_special_tokens": list(_ADDED[1:]),
            "clean_up_tokenization_spaces": False,
        },
    )
    _write_json(folder / "generation_config.json", {"eos_token_id": end, "pad_token_id": pad})
    _write_json(
        folder / "preprocessor_config.json",
        {
            "image_processor_type": "Idefics3ImageProcessor",
            "processor_class": "Idefics3Processor",
            "do_image_splitting": True,
            "max_image_size": {"longest_edge": _TILE},
            "size": {"longest_edge": _TILE * _MAX_TILES},
        },
    )
    _write_json(folder / "processor_config.json", {"processor_class": "Idefics3Processor", "image_seq_len": 4})
    return folder


def picture(width: int, height: int, colour: tuple[int, int, int] = (200, 30, 30), kind: str = "PNG") -> Image:
    """Return an image file of one colour."""
    file = io.BytesIO()
    Picture.new("RGB", (width, height), colour).save(file, kind)
    return image_of(file.getvalue())


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _ADDED])
    return tokenizer


def _config(vocab_size: int, end: int, pad: int, image: int) -> dict[str, Any]:
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "dtype": "float32",
        "image_token_id": image,
        "scale_factor": 2,
        "tie_word_embeddings": False,
        "eos_token_id": end,
        "pad_token_id": pad,
        "text_config": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": vocab_size,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": CONTEXT_TOKENS,
            "eos_token_id": end,
            "pad_token_id": pad,
            "dtype": "float32",
        },
        "vision_config": {
            "model_type": "idefics3_vision",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": _TILE,
            "patch_size": 14,
        },
    }


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
