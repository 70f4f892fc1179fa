"""Published chat templates: the ones that a service accepts, and the reasons for which it refuses the others.

    python -m tests.benchmarks.templates FOLDER... [--table docs/guides/models.md]

Each distinct `.jinja` file in the folders gets a model folder: our tokenizer with the delimiters that the template
writes, and its end of turn. `served`: a service starts with the template, and renders plain chats to the same ids
as transformers. `tools` is the tool support of these templates: `yes`, `none` if the template renders no tools,
`off` if no parser reads its calls. Templates that are not for chat are skipped: those in folders named `pooling`,
and those whose names end in `_training`, which mark the tokens that a trainer masks. `--table` writes the verdicts
into a page.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import itertools
import logging
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog
from transformers import PreTrainedTokenizerFast

from agentloop.errors import AgentLoopError, TemplateError
from agentloop.generation.round_trip import DERIVED
from agentloop.types import Message
from agentloop_servers.chat_format.load import ChatFormat, load_chat_format
from agentloop_servers.config.service import ChatSettings
from tests.support.families.table import Family, write_model

_BOS, _EOS = "<s>", "</s>"
_MARK = re.compile(
    r"<[|\uff5c][^<>|\uff5c\s]{1,48}[|\uff5c]>|<\|?[a-zA-Z_:]{2,32}\|?>|</[a-zA-Z_:]{2,32}>|\[/?[A-Z_]{3,32}\]"
    r"|\]<\][a-z]+\[>\["
)
_PUNCTUATION = '<|"|>'  # Gemma-4's string delimiter
_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|eot|>", "<|end_of_text|>", "<|END_OF_TURN_TOKEN|>",
    "<|return|>", "<|end|>", "<end_of_utterance>", "<|message_sep|>", "<|endofturn|>", "<|assistant_end|>",
    "[e~[", "<seed:eos>", "<|user|>", "<SPECIAL_12>",
    "</assistant>", "<sep>", "<end_of_sentence>", "<|eos|>",
)  # fmt: skip
_BUILT_ENDS = {"hy_eos": "<｜hy_eos:opensource｜>"}  # assembled by the template
_FURTHER_ENDS = (
    "<|observation|>", "<|call|>", "<|eom_id|>", "<|tools_suffix|>", "<|tool_response>", "<|calls|>",
)  # fmt: skip
"""End tokens of turns with calls."""
_TABLE_BEGIN, _TABLE_END = "<!-- templates -->", "<!-- /templates -->"
_REASONS = {
    "cannot be derived: of": "it writes a part of a call in more than one way",
    "'derived' does not read": "its answers stand in marks, or its history is not what its prompts begin with",
    "chat template failed: ": "the template fails without tools or without the arguments that only it defines",
}
_SYSTEM = Message("system", "Antworte knapp.")
_CHAT = (
    Message("user", "Was ist ein “Turm”?"),
    Message("assistant", "Ein Bau: 塔."),
    Message("user", "Und im Schach?"),
    Message("assistant", "Eine Figur ♜"),
    Message("user", "Danke ]"),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A service's verdict on one template; `fault` is the reason if it does not start, or renders other ids."""

    name: str
    fault: str | None
    tools: str = ""
    parser: str = ""
    mark: str = ""  # delimiter that begins its calls
    forks: bool = False  # the rendering of a plain chat's second turn cannot be bridged
    objection: str = ""  # reason why it has no tools


def judge(path: Path) -> Verdict:
    """Start with a template in a separate model folder, and compare its plain chats."""
    name = f"{path.parent.name}/{path.stem}"
    source = path.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as made:
        folder = write_model(Path(made), _family(source), source)
        try:
            settings = ChatSettings.model_validate({"template": {"date": datetime.date.today()}})
            chat = load_chat_format(folder, settings)
            fault = _difference(folder, chat)
        except AgentLoopError as error:
            return Verdict(name, f"{type(error).__name__}: {error.message}")
    facts = chat.renderer.facts
    tools = "yes" if facts.supports_tools else "off" if "no parser reads" in str(facts.tools_objection) else "none"
    marks = chat.parser.delimiters
    mark = next(iter((*marks.openings, *marks.leading)), "")
    return Verdict(name, fault, tools, chat.name, mark, facts.plain_turns is not None, facts.tools_objection or "")


def _family(source: str) -> Family:
    marks = list(dict.fromkeys([*_MARK.findall(source), *([_PUNCTUATION] if _PUNCTUATION in source else [])]))
    ends = _BUILT_ENDS | {end: end for end in _ENDS}
    end = next((end for sign, end in ends.items() if sign in source), _EOS)
    special = dict.fromkeys([_BOS, _EOS, end, *(mark for mark in marks if not _is_markup(mark))])
    markup = tuple(mark for mark in marks if _is_markup(mark) and mark not in special)
    stops = (end, *(mark for mark in _FURTHER_ENDS if mark in source))
    return Family("published", "", tuple(special), markup, stops, eos=end, bos=_BOS)


def _is_markup(mark: str) -> bool:
    """Return True if a tokenizer would decode the delimiter of reasoning or calls as text."""
    return re.fullmatch(r"</?[a-z_:]+>", mark) is not None


def _difference(folder: Path, chat: ChatFormat) -> str | None:
    """Return the plain chat whose rendering differs from transformers; refused chats are skipped."""
    family = _family((folder / "chat_template.jinja").read_text(encoding="utf-8"))
    reference = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token=family.bos, eos_token=family.eos
    )
    reference.chat_template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    num_compared = 0
    for messages in _chats():
        try:
            ids = chat.renderer.render(messages, ())
        except TemplateError:
            continue
        expected = _expected(reference, messages)
        num_compared += 1
        if ids != expected:
            return f"a chat of {len(messages)} messages differs: {chat.renderer.decode(ids)[-200:]!r}"
    return None if num_compared else "no plain chat is rendered"


def _chats() -> Iterator[Sequence[Message]]:
    for num_messages in (1, 3, 5):
        yield _CHAT[:num_messages]
        yield (_SYSTEM, *_CHAT[:num_messages])


def _expected(reference: PreTrainedTokenizerFast, messages: Sequence[Message]) -> list[int]:
    """Return transformers' ids; templates that accept content only as parts get parts."""
    texts = []
    # some templates fail without a list of tools
    for has_parts, tools in itertools.product((False, True), (None, [])):
        entries = [
            {"role": one.role, "content": [{"type": "text", "text": one.content}] if has_parts else one.content}
            for one in messages
        ]
        try:
            texts.append(reference.apply_chat_template(entries, tools, add_generation_prompt=True, tokenize=False))
        except Exception:
            continue
    shown = next((text for text in texts if messages[-1].content in text), texts[0])
    return list(reference(shown, add_special_tokens=False)["input_ids"])


def main() -> None:
    """Print one line per template, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--table", type=Path, help="a page whose table of templates is written anew")
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    found: dict[bytes, Path] = {}
    for folder in given.folders:
        for path in sorted(folder.rglob("*.jinja")):
            if not path.stem.endswith("_training") and "pooling" not in path.parts:
                found.setdefault(hashlib.sha256(path.read_bytes()).digest(), path)
    verdicts = [judge(path) for path in found.values()]
    for one in verdicts:
        state = "served " if one.fault is None else "REFUSED"
        fork = " forks" if one.forks else ""
        print(f"{state} {one.name:60} tools {one.tools:4} {one.parser}{fork} {one.fault or one.objection}"[:400])
    served = [one for one in verdicts if one.fault is None]
    kinds = ", ".join(f"{sum(one.tools == kind for one in served)} tools {kind}" for kind in ("yes", "none", "off"))
    print(f"{len(served)} of {len(verdicts)} templates are served: {kinds}")
    if given.table is not None:
        before, _, rest = given.table.read_text(encoding="utf-8").partition(_TABLE_BEGIN)
        behind = rest.partition(_TABLE_END)[2]
        page = f"{before}{_TABLE_BEGIN}\n{_table(verdicts)}\n{_TABLE_END}{behind}"
        given.table.write_text(page, encoding="utf-8")


def _table(verdicts: Sequence[Verdict]) -> str:
    """Return the verdicts as a table: templates with tools by their parser, the others by the reason."""
    rows: dict[tuple[str, str], list[str]] = {}
    for one in verdicts:
        name = one.name.rpartition("/")[2].removeprefix("tool_chat_template_")
        if one.fault is not None:
            row = "refused", _reason(one.fault)
        elif one.tools == "yes":
            row = (
                "tools",
                f"`{one.parser}`" + (f": `{one.mark}`" if one.parser == DERIVED else "").replace("|", r"\|"),
            )
        else:
            row = "plain chat", _reason(one.objection) if one.tools == "off" else "its template takes no tools"
        rows.setdefault(row, []).append(name)
    kinds = ("tools", "plain chat", "refused")
    ordered = sorted(rows.items(), key=lambda item: (kinds.index(item[0][0]), -len(item[1]), item[0][1]))
    lines = [f"| {kind} | {why} | {', '.join(sorted(names))} |" for (kind, why), names in ordered]
    return "\n".join(("| served for | parser, or the reason | templates |", "|---|---|---|", *lines))


def _reason(text: str) -> str:
    """Shorten an objection to the part that several templates share."""
    for sign, reason in _REASONS.items():
        if sign in text:
            return reason
    text = text.removeprefix("TemplateError: the chat template does not render a conversation without tools: ")
    return re.split(r"[:,] ['\"]|, which is|; ", text.rpartition("cannot be derived: ")[2])[0].replace("|", "\\|")


if __name__ == "__main__":
    main()
