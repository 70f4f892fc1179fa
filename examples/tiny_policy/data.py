"""Training data: dialogues of a good policy, rendered by the chat template and encoded.

The file that `make_data` writes is all that training needs, so training can run on a host without agentloop.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from folder import CHAT_TEMPLATE, MARKERS, PAD, TURN_END, TURN_START, train_tokenizer, write_folder
from tasks import DEFINITIONS, FAMILIES, Problem, dialogue, problems
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

NUM_TOKENIZER_TEXTS = 20_000
NUM_VALIDATION = 1024
CHUNK = 10_000


def make_tokenizer(folder: Path, seed: int) -> None:
    """Train the tokenizer on rendered training dialogues and write `folder` without weights."""
    added = re.compile("|".join(map(re.escape, (PAD, TURN_START, TURN_END, *MARKERS))))
    texts = ("".join(rendered(problem)) for problem in islice(problems(seed, held_out=False), NUM_TOKENIZER_TEXTS))
    write_folder(folder, train_tokenizer(piece for text in texts for piece in added.split(text)))


def make_data(file: Path, tokenizer_file: Path, num_dialogues: int, seed: int) -> None:
    """Write training and held-out dialogues as one .npz file.

    `ids` concatenates dialogues whose lengths are `lengths`; `val_*` are the same of the held-out split.
    """
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    validation = list(islice(problems(seed, held_out=True), NUM_VALIDATION))
    families = [maker.__name__ for maker, _ in FAMILIES]
    ids, lengths = _encode(islice(problems(seed, held_out=False), num_dialogues), tokenizer)
    val_ids, val_lengths = _encode(iter(validation), tokenizer)
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        file,
        ids=ids,
        lengths=lengths,
        val_ids=val_ids,
        val_lengths=val_lengths,
        val_family=np.array([families.index(problem.family) for problem in validation], np.uint8),
        families=np.array(families),
    )


def rendered(problem: Problem) -> tuple[str, str]:
    """The dialogue as text in two parts: the tool section, and the turns after it."""
    return tool_section(problem.tools), _render(dialogue(problem), None)


@cache
def tool_section(tools: tuple[str, ...]) -> str:
    """What the template puts before the first turn."""
    question = [{"role": "user", "content": "?"}]
    return _render(question, [DEFINITIONS[name] for name in tools]).removesuffix(_render(question, None))


@cache
def _template() -> str:
    return CHAT_TEMPLATE.read_text(encoding="utf-8")


def _render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    texts, _ = render_jinja_template([messages], tools=tools, chat_template=_template())
    return str(texts[0])


def _encode(
    source: Iterator[Problem], tokenizer: Tokenizer
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
    """Ids and lengths. A part starts with an added token, so parts can be encoded one by one."""
    sections: dict[str, list[int]] = {}
    ids: list[npt.NDArray[np.uint16]] = []
    while chunk := [rendered(problem) for problem in islice(source, CHUNK)]:
        for section in {section for section, _ in chunk} - sections.keys():
            sections[section] = tokenizer.encode(section).ids
        turns = tokenizer.encode_batch([turns for _, turns in chunk])
        ids += [np.array(sections[s] + t.ids, np.uint16) for (s, _), t in zip(chunk, turns, strict=True)]
    return np.concatenate(ids), np.array([len(one) for one in ids], np.uint16)
