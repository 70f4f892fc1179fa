"""Families of models as data: added tokens, stops, reasoning delimiters and call syntax, with a model folder each.

A folder has the family's chat template (`templates/`, sources in the README) and our own tokenizer: a small BPE
with the family's added tokens, flagged special as in the family's own tokenizer. Gemma's has byte fallback tokens;
all others are byte-level and split text like Qwen's, so that line breaks join the preceding text.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEMPLATES = Path(__file__).parent / "templates"
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_THINK = ("<think>", "</think>")
_CHATML = (
    *(
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
        "<|video_pad|>",
    ),
)
_QWEN3 = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", *_THINK)
_LLAMA = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
    "<|python_tag|>",
)  # fmt: skip
_BAR = "\uff5c"  # DeepSeek writes the fullwidth bar
_DEEPSEEK = tuple(f"<{_BAR}{text}{_BAR}>" for text in ("begin▁of▁sentence", "end▁of▁sentence", "▁pad▁"))
_DEEPSEEK_MARKS = (
    "User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end",
    "tool▁outputs▁begin", "tool▁outputs▁end", "tool▁output▁begin", "tool▁output▁end", "tool▁sep",
)  # fmt: skip
_DEEPSEEK_MARKUP = (*(f"<{_BAR}{text}{_BAR}>" for text in _DEEPSEEK_MARKS), *_THINK)
_GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_KIMI = tuple(f"<|im_{text}|>" for text in ("end", "user", "assistant", "system", "middle"))
_NEMOTRON = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", *_QWEN3)
_HARMONY = ("startoftext", "endoftext", "return", "constrain", "channel", "start", "end", "message", "call")
_PHI = (
    "endoftext",
    "end",
    "system",
    "user",
    "assistant",
    "tool",
    "/tool",
    "tool_call",
    "/tool_call",
    "tool_response",
)
_MISTRAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]",
    "[CALL_ID]", "[THINK]", "[/THINK]",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family:
    """The facts of one family. `stops` are the generation config's; the one that ends a plain answer is first.

    `special` and `markup` are added tokens: control tokens proper, and those that a tokenizer decodes as text.
    `calls` names the syntax of its tool calls, `num_parallel` per turn. None: it has no tools.
    """

    name: str
    models: str
    special: tuple[str, ...]
    markup: tuple[str, ...]
    stops: tuple[str, ...]
    eos: str  # in the tokenizer's configuration
    bos: str | None = None
    think: tuple[str, str] | None = None
    opens_reasoning: bool = False  # the generation prompt opens the reasoning
    calls: str | None = None
    num_parallel: int = 2
    has_byte_fallback: bool = False

    @property
    def template(self) -> str:
        """The source of its chat template."""
        return (TEMPLATES / f"{self.name}.jinja").read_text(encoding="utf-8")


def _qwen(name: str, models_: str, *, calls: str, think: bool, opens_reasoning: bool = False) -> Family:
    return Family(
        name,
        models_,
        special=_CHATML,
        markup=_QWEN3,
        stops=("<|im_end|>", "<|endoftext|>"),
        eos="<|im_end|>",
        think=_THINK if think else None,
        opens_reasoning=opens_reasoning,
        calls=calls,
    )


FAMILIES = (
    Family(
        "qwen2_5", "Qwen2.5-*-Instruct", special=_CHATML, markup=("<tool_call>", "</tool_call>"),
        stops=("<|im_end|>", "<|endoftext|>"), eos="<|im_end|>", calls="hermes",
    ),
    _qwen("qwen3", "Qwen3-* (hybrid)", calls="hermes", think=True),
    _qwen("qwen3_instruct_2507", "Qwen3-*-Instruct-2507", calls="hermes", think=False),
    _qwen("qwen3_thinking_2507", "Qwen3-*-Thinking-2507", calls="hermes", think=True, opens_reasoning=True),
    _qwen("qwen3_coder", "Qwen3-Coder-*", calls="qwen3_xml", think=False),
    _qwen("qwen3_5", "Qwen3.5-*", calls="qwen3_xml", think=True, opens_reasoning=True),
    _qwen("qwen3_6", "Qwen3.6-*", calls="qwen3_xml", think=True, opens_reasoning=True),
    Family(
        "llama3_1", "Llama-3.1-*-Instruct", special=_LLAMA, markup=(), bos="<|begin_of_text|>", eos="<|eot_id|>",
        stops=("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"), calls="llama3_json", num_parallel=1,
    ),
    Family(
        "llama3_2", "Llama-3.2-*-Instruct", special=_LLAMA, markup=(), bos="<|begin_of_text|>", eos="<|eot_id|>",
        stops=("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"), calls="llama3_json", num_parallel=1,
    ),
    Family(
        "deepseek_r1", "DeepSeek-R1-Distill-*", special=_DEEPSEEK, markup=_DEEPSEEK_MARKUP, bos=_DEEPSEEK[0],
        eos=_DEEPSEEK[1], stops=(_DEEPSEEK[1],), think=_THINK, opens_reasoning=True,
    ),
    Family(
        "deepseek_v3_1", "DeepSeek-V3.1", special=_DEEPSEEK, markup=_DEEPSEEK_MARKUP, bos=_DEEPSEEK[0],
        eos=_DEEPSEEK[1], stops=(_DEEPSEEK[1],), think=_THINK, calls="deepseek_v31",
    ),
    Family(
        "glm4_5", "GLM-4.5", special=_GLM,
        markup=(*_QWEN3, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink"),
        stops=("<|user|>", "<|endoftext|>", "<|observation|>"), eos="<|endoftext|>", think=_THINK, calls="glm45",
    ),
    Family(
        "kimi_k2", "Kimi-K2-Instruct",
        special=("[BOS]", "[EOS]", "[PAD]", *_KIMI),
        markup=(
            "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>", "<|tool_call_end|>",
        ),
        stops=("<|im_end|>",), eos="[EOS]", bos="[BOS]", calls="kimi_k2",
    ),
    Family(
        "mistral_small_3_1", "Mistral-Small-3.1-24B-Instruct-2503", special=_MISTRAL, markup=(), stops=("</s>",),
        eos="</s>", bos="<s>", calls="mistral",
    ),
    Family(
        "mistral_small_3_2", "Mistral-Small-3.2-24B-Instruct-2506", special=_MISTRAL, markup=(), stops=("</s>",),
        eos="</s>", bos="<s>", calls="mistral",
    ),
    Family(
        "nemotron_3", "NVIDIA-Nemotron-3-Nano-*", special=_NEMOTRON,
        markup=(), stops=("<|im_end|>", "</s>"), eos="<|im_end|>", bos="<s>", think=_THINK, opens_reasoning=True,
        calls="qwen3_xml",
    ),
    Family(
        "gpt_oss", "gpt-oss-20b, gpt-oss-120b",
        special=tuple(f"<|{text}|>" for text in _HARMONY),
        markup=(), stops=("<|return|>", "<|endoftext|>", "<|call|>"), eos="<|return|>", bos="<|startoftext|>",
        calls="harmony", num_parallel=1,
    ),
    Family(
        "gemma3", "gemma-3-*-it", special=("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
        markup=(), stops=("<end_of_turn>", "<eos>"), eos="<eos>", bos="<bos>", has_byte_fallback=True,
    ),
    Family(
        "phi4_mini", "Phi-4-mini-instruct",
        special=tuple(f"<|{text}|>" for text in _PHI),
        markup=(), stops=("<|end|>", "<|endoftext|>"), eos="<|endoftext|>", bos="<|endoftext|>",
    ),
)  # fmt: skip
_GRANITE = ("end_of_text", "start_of_role", "end_of_role", "tool_call")
_GEMMA4 = ("<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|channel>", "<channel|>", '<|"|>')
UNTAUGHT = (
    Family(
        "gemma4", "gemma-4-*-it", special=("<pad>", "<eos>", "<bos>", *_GEMMA4), markup=(),
        stops=("<turn|>", "<eos>"), eos="<eos>", bos="<bos>", think=("<|channel>thought", "<channel|>"),
        has_byte_fallback=True,
    ),
    Family(
        "granite_3_3", "granite-3.3-*-instruct", special=tuple(f"<|{text}|>" for text in _GRANITE), markup=(),
        stops=("<|end_of_text|>",), eos="<|end_of_text|>", calls="granite",
    ),
    Family(
        "lfm2", "LFM2-*", special=(*_CHATML[1:3], "<|startoftext|>", "<|tool_call_start|>", "<|tool_call_end|>"),
        markup=(), stops=("<|im_end|>",), eos="<|im_end|>", bos="<|startoftext|>",
    ),
)  # fmt: skip
"""Families whose calls none of our parsers reads, or whose templates omit the calls of earlier turns."""

DERIVED = tuple(
    Family(
        name,
        models_,
        special=("<s>", *dict.fromkeys((*marks.split(), end, *stops.split()))),
        markup=(),
        stops=(end, *stops.split()),
        eos=end,
        bos="<s>",
    )
    for name, models_, marks, end, stops in (
        ("seed_oss", "Seed-OSS-*", "<seed:bos> <seed:think> </seed:think>", "<seed:eos>", ""),
        ("minimax_m2", "MiniMax-M2", "]~!b[ ]~b] <minimax:tool_call> </minimax:tool_call>", "[e~[", ""),
        ("deepseek_v3_2", "DeepSeek-V3.2", "<｜begin▁of▁sentence｜> <｜User｜> <｜Assistant｜>", _DEEPSEEK[1], ""),
        ("lfm2_5", "LFM2.5-*", "<|im_start|> <|tool_call_start|> <|tool_call_end|>", "<|im_end|>", ""),
        ("apertus", "Apertus-*", "<|tools_prefix|> <|inner_prefix|>", "<|assistant_end|>", "<|tools_suffix|>"),
        (
            "functionary_3_1",
            "functionary-v3.1",
            "<|start_header_id|> <|end_header_id|>",
            "<|eot_id|>",
            "<|eom_id|>",
        ),
        ("hunyuan_a13b", "Hunyuan-A13B-*", "<|extra_0|> <|extra_4|>", "<|eos|>", ""),
        (
            "internlm2",
            "internlm2-chat-*",
            "<|im_start|> <|action_start|> <|action_end|> <|plugin|>",
            "<|im_end|>",
            "",
        ),
        ("xlam_qwen", "xLAM-2-*", "<|im_start|>", "<|im_end|>", ""),
        ("kimi_k3", "Kimi-K3", "<|open|> <|close|> <|sep|>", "<|end_of_msg|>", ""),
        ("muse_glimmer", "muse-glimmer", "<|start|> <|message|> <|eom|>", "<|eot|>", ""),
        ("minicpm5", "MiniCPM5-*", "<|im_start|>", "<|im_end|>", ""),
        (
            "cohere2_moe",
            "Cohere2 MoE",
            "<|START_OF_TURN_TOKEN|> <|CHATBOT_TOKEN|> <|START_THINKING|> <|END_THINKING|>",
            "<|END_OF_TURN_TOKEN|>",
            "",
        ),
        ("solar_open", "Solar-Open-*", "<|begin|> <|content|> <|tool_calls|>", "<|end|>", "<|calls|>"),
        ("functiongemma", "functiongemma-*", "<start_of_turn> <escape>", "<end_of_turn>", ""),
        ("gemma4", "gemma-4-*-it", " ".join(_GEMMA4), "<turn|>", "<|tool_response>"),
    )
)
"""Families whose call format is derived from their template."""

FAMILY = {family.name: family for family in (*DERIVED, *FAMILIES, *UNTAUGHT)}


def write_family(folder: Path, name: str) -> Path:
    """Write a model folder of the family: tokenizer, template, configurations. Takes a few milliseconds."""
    return write_model(folder, FAMILY[name], FAMILY[name].template)


def write_model(folder: Path, family: Family, template: str) -> Path:
    """Write a model folder with the family's tokens and stops, and any template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_of(family)
    tokenizer.save(str(folder / "tokenizer.json"))
    stops = [tokenizer.token_to_id(stop) for stop in family.stops]
    (folder / "config.json").write_text(
        json.dumps({"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": stops})
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    config = {"eos_token": family.eos, "bos_token": family.bos, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def tokenizer_of(family: Family) -> Tokenizer:
    """Return the family's tokenizer: ours, with the family's added tokens."""
    tokenizer = Tokenizer.from_str(_plain_tokenizer(family.has_byte_fallback))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in family.special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.markup])
    return tokenizer


@functools.cache
def _plain_tokenizer(has_byte_fallback: bool) -> str:
    sentences = [
        "What is 37 * 12 + 5? The answer is 449.\n\nThe user asked, and the tool said so.\n",
        '{"name": "calculator", "arguments": {"expression": "37 * 12 + 5"}}\n\n{"a": [1, 2]}\n',
        "system\nuser\nassistant\ntool\n<tools>\n</tools>\n\n<function=x>\n</function>\n<parameter=a>\n</parameter>\n",
        "im_start im_end tool_call endoftext <|im_end|>\n[INST] [/INST] <end_of_turn>\n>\n)\n.\n\n",
    ]
    if has_byte_fallback:
        return _fallback_tokenizer().to_str()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=480, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(sentences * 4, trainer)
    return tokenizer.to_str()


def _fallback_tokenizer() -> Tokenizer:
    """Return a tokenizer like Gemma's: spaces are separate symbols, unknown characters are byte tokens."""
    pieces = [f"<0x{value:02X}>" for value in range(256)]
    chars = [chr(code) for code in range(33, 127)]
    words = ["▁▁", "▁T", "th", "he", "▁th", "▁the", "\n\n"]
    vocab = {text: index for index, text in enumerate([*pieces, "▁", "\n", *chars, *words])}
    merges = [("▁", "▁"), ("▁", "T"), ("t", "h"), ("h", "e"), ("▁", "th"), ("▁th", "e"), ("\n", "\n")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer
