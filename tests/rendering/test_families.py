"""One case per family: bridges write the same text and ids as the template, or a refusal gives the reason.

The reference is transformers with the same folder. The parsers' cases are in `tests/parsers/test_families.py`.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers

from agentloop.errors import TemplateError, TemplateNotPrefixStable
from agentloop.rendering.port import TurnEnd
from agentloop.rendering.renderer import OnUnstable, RenderSettings, TemplateRenderer
from agentloop.types import Message, Thinking, ToolCall
from tests.support.families.table import FAMILIES, FAMILY, Family, write_family

TODAY = datetime.datetime.now().date()
MOVED = r"earlier text changes.*AVAILABLE_TOOLS"
UNENDED = r"does not end an assistant turn with a stop token"
# By family: the turns that cannot be bridged, and the reason. All other turns are bridged exactly.
REFUSED = {
    "mistral_small_3_1": {"user_turns": MOVED},
    "mistral_small_3_2": {"user_turns": MOVED},
    # An answer is sampled with another end than the template writes in the history.
    "gpt_oss": {"user_turns": UNENDED, "plain_turns": UNENDED},
}
STRIPS = {"qwen3", "qwen3_thinking_2507", "qwen3_5", "qwen3_6", "deepseek_r1", "glm4_5", "nemotron_3"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look up a word, say “Turm”.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string"}, "size": {"type": "integer"}},
                "required": ["word"],
            },
        },
    }
]
names = [family.name for family in FAMILIES]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {name: write_family(root / name, name) for name in names}


@pytest.fixture(scope="module")
def renderers(folders: dict[str, Path]) -> dict[str, TemplateRenderer]:
    settings = RenderSettings(OnUnstable.FORK, date=TODAY)
    return {name: TemplateRenderer.from_directory(folder, settings) for name, folder in folders.items()}


class Reference:
    """The family's template and tokenizer, run by transformers."""

    def __init__(self, family: Family, folder: Path) -> None:
        self._tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), bos_token=family.bos, eos_token=family.eos
        )
        self._tokenizer.chat_template = family.template
        self._thought = "thinking" if family.name == "gpt_oss" else "reasoning_content"

    def text(self, messages: Sequence[Message], tools: Any, *, is_open: bool = True) -> str:
        entries = [self._entry(message) for message in messages]
        return self._tokenizer.apply_chat_template(
            entries, tools=tools or None, add_generation_prompt=is_open, tokenize=False
        )

    def begun(self, messages: Sequence[Message]) -> str:
        entries = [self._entry(message) for message in messages]
        return self._tokenizer.apply_chat_template(entries, continue_final_message=True, tokenize=False)

    def ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _entry(self, message: Message) -> dict[str, Any]:
        entry: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls:
            entry["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}}
                for c in message.tool_calls
            ]
        if message.reasoning:
            entry[self._thought] = message.reasoning
        return entry | {
            key: value for key in ("tool_call_id", "name") if (value := getattr(message, key)) is not None
        }


def conversation(family: Family, *, has_tools: bool) -> list[Message]:
    """Return five turns: parallel calls, a failing call, an answer, and two more questions; unicode throughout."""
    thoughts = iter(["Erst nachsehen …\n\nzwei Wörter", "noch 一次", "so, ♜", "kurz", "Ende"])

    def said(content: str, *words: str) -> list[Message]:
        turn = len(messages)
        calls = tuple(
            ToolCall(f"c{turn:03d}{i:05d}", "look_up", {"word": word, "size": i}) for i, word in enumerate(words)
        )
        reasoning = next(thoughts) if family.think or family.calls == "harmony" else ""
        shown = [] if family.calls == "harmony" and calls else [content]  # its reasoning is its text
        results = ["Error: no such word: 塔\n", 'found {"a": ["é"]}\n\n']
        answers = [
            Message("tool", results[i % 2], tool_call_id=call.id, name="look_up") for i, call in enumerate(calls)
        ]
        return [Message("assistant", "".join(shown), calls, reasoning=reasoning), *answers]

    messages = [Message("system", "Antworte knapp. 😀"), Message("user", "Was ist ein “Turm”?\n\n")]
    if has_tools:
        messages += said("Ich sehe nach.", *["Turm", "tower 🗼"][: family.num_parallel])
        messages += said("", "塔")
    else:
        messages += [*said("Ein Bau."), Message("user", "Sicher?"), *said("Ja."), Message("user", "Und?")]
    messages += [
        *said("Ein Vogel."),
        Message("user", "Und im Schach?"),
        *said("Eine Figur: ♜"),
        Message("user", ">"),
    ]
    return [*messages, *said("Bitte."), Message("user", "Danke ]")]


def turns_of(messages: Sequence[Message]) -> list[int]:
    return [index for index, message in enumerate(messages) if message.role == "assistant"]


def sampled_text(reference: Reference, family: Family, messages: list[Message], turn: int, tools: Any) -> str:
    """Return the turn as the template writes it after the prompt, with its stop token."""
    prompt, message = reference.text(messages[:turn], tools), messages[turn]
    if family.name == "deepseek_r1":  # it never renders reasoning, although it opens one
        return f"{message.reasoning}\n</think>\n\n{message.content}{family.eos}"
    whole = reference.text(messages[: turn + 1], tools, is_open=False)
    if family.name == "glm4_5":  # the first token of the next message is the stop token
        whole += "<|observation|>" if message.tool_calls else "<|user|>"
    if family.name == "deepseek_v3_1" and message.reasoning:  # it does not render it either
        return f"{message.content}{family.eos}"
    assert whole.startswith(prompt)
    return re.split(f"({'|'.join(map(re.escape, family.stops))})", whole[len(prompt) :])[0] + next(
        stop for stop in re.findall("|".join(map(re.escape, family.stops)), whole[len(prompt) :])
    )


@pytest.mark.parametrize("name", names)
def test_a_familys_facts(renderers: dict[str, TemplateRenderer], name: str):
    family, facts = FAMILY[name], renderers[name].facts
    assert facts.supports_tools == (family.calls is not None and name != "deepseek_v3_1")
    assert facts.strips_thinking == (name in STRIPS)
    assert set(facts.stop_tokens) == {*family.stops, family.eos}
    assert family.stops[0] in facts.literals
    for kind in ("tool_turns", "user_turns", "plain_turns"):
        reason = REFUSED.get(name, {}).get(kind)
        found = getattr(facts, kind)
        assert (found is None) if reason is None else re.search(reason, found)


@pytest.mark.parametrize("has_tools", [True, False])
@pytest.mark.parametrize("name", names)
def test_bridges_are_the_templates_own(
    folders: dict[str, Path], renderers: dict[str, TemplateRenderer], name: str, has_tools: bool
):
    family, renderer = FAMILY[name], renderers[name]
    if has_tools and not renderer.facts.supports_tools:
        reason = "must alternate" if name == "gemma3" else "it does not show tool definitions"
        with pytest.raises(TemplateError, match=f"does not support tools: .*{reason}"):
            renderer.render([Message("user", "x")], TOOLS)
        return
    reference, tools = Reference(family, folders[name]), TOOLS if has_tools else []
    messages = conversation(family, has_tools=has_tools)
    refused = REFUSED.get(name, {}).get("user_turns" if has_tools else "plain_turns")
    path, turns = renderer.render(messages[: turns_of(messages)[0]], tools), turns_of(messages)
    for turn, following in zip(turns, [*turns[1:], len(messages)], strict=True):
        prompt, whole = (reference.text(messages[:end], tools) for end in (turn, following))
        assert renderer.render(messages[:following], tools) == reference.ids(whole)
        appended, is_cycle = messages[turn + 1 : following], messages[turn].tool_calls
        if refused and not is_cycle:
            with pytest.raises(TemplateNotPrefixStable, match=refused):
                renderer.bridge(appended, tools, TurnEnd())
            path = reference.ids(whole)  # the fork of the conversation
            continue
        sampled = reference.ids(sampled_text(reference, family, messages, turn, tools))
        bridge = renderer.bridge(appended, tools, TurnEnd(sampled[-1]))
        opened = renderer.bridge(appended, tools, TurnEnd())
        assert opened == [sampled[-1], *bridge]
        assert whole.endswith(renderer.decode(opened))
        assert reference.ids(whole)[-len(opened) :] == opened
        if is_cycle:
            assert [*reference.ids(prompt), *sampled, *bridge] == reference.ids(whole)
        path += [*sampled, *bridge]
        if name not in STRIPS:
            assert path == reference.ids(whole)
    assert name not in STRIPS or refused or messages[turns[-2]].reasoning in renderer.decode(path)


@pytest.mark.parametrize("name", [family.name for family in FAMILIES if family.calls])
def test_a_user_may_speak_right_behind_a_tool(
    folders: dict[str, Path], renderers: dict[str, TemplateRenderer], name: str
):
    family, renderer = FAMILY[name], renderers[name]
    messages = [*conversation(family, has_tools=True)[: 3 + family.num_parallel], Message("user", "Stop: 止まれ")]
    if not renderer.facts.supports_tools:
        return
    if "user_turns" in REFUSED.get(name, {}):
        if name != "gpt_oss":  # its calls end with their own stop token
            with pytest.raises(TemplateNotPrefixStable):
                renderer.bridge(messages[3:], TOOLS, TurnEnd())
        return
    bridge = renderer.bridge(messages[3:], TOOLS, TurnEnd())
    assert (
        Reference(family, folders[name]).ids(Reference(family, folders[name]).text(messages, TOOLS))[-len(bridge) :]
        == bridge
    )


@pytest.mark.parametrize("name", sorted(STRIPS))
def test_thoughts_as_the_template_has_them_are_named(folders: dict[str, Path], name: str):
    renderer = TemplateRenderer.from_directory(folders[name], RenderSettings(thinking=Thinking.TEMPLATE))
    with pytest.raises(TemplateNotPrefixStable, match="drops earlier reasoning at a user message"):
        renderer.bridge([Message("user", "And?")], [], TurnEnd())
    if renderer.facts.supports_tools:
        assert renderer.bridge([Message("tool", "5", name="look_up", tool_call_id="c00000000")], TOOLS, TurnEnd())


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "qwen3_6", "glm4_5", "nemotron_3"])
def test_without_thinking_bridges_are_taken_too(folders: dict[str, Path], name: str):
    """The empty reasoning that the generation prompt writes stays in the history, like any reasoning."""
    kwargs = {"enable_thinking": False}
    settings = RenderSettings(kwargs=kwargs)
    by_default, by_call = (
        TemplateRenderer.from_directory(folders[name], settings),
        TemplateRenderer.from_directory(folders[name]),
    )
    asked = [Message("user", "Hi")]
    assert by_default.render(asked, []) == by_call.render(asked, [], kwargs) != by_call.render(asked, [])
    bridge = by_call.bridge(asked, TOOLS, TurnEnd(), kwargs)
    assert bridge == by_default.bridge(asked, TOOLS, TurnEnd())
    assert re.search(r"<think>\s*</think>\s*$", by_call.decode(bridge))


@pytest.mark.parametrize(
    ("name", "closing"),
    [
        ("qwen3", "\n</think>\n\n<|im_end|>"),
        ("qwen3_5", "\n</think>\n\n<|im_end|>"),
        ("nemotron_3", "\n</think><|im_end|>"),
        ("glm4_5", "</think><|user|>"),
        ("deepseek_r1", "\n</think>\n\n<｜end▁of▁sentence｜>"),
    ],
)
def test_a_thought_that_was_cut_is_closed_as_the_template_closes_it(
    renderers: dict[str, TemplateRenderer], name: str, closing: str
):
    renderer = renderers[name]
    asked = [Message("user", "Go on.")]
    bridge = renderer.bridge(asked, [], TurnEnd(None, is_thinking=True))
    assert renderer.decode(bridge).startswith(closing)
    assert bridge == renderer.ids(renderer.decode(bridge))
    assert renderer.decode(bridge).endswith(renderer.decode(renderer.bridge(asked, [], TurnEnd())))


@pytest.mark.parametrize(
    ("name", "stop", "closing"),
    [
        ("qwen2_5", "<|endoftext|>", "<|im_end|>\n<|im_start|>user"),
        ("glm4_5", "<|observation|>", "<|user|>\n"),
        ("llama3_1", "<|eom_id|>", "<|eot_id|><|start_header_id|>user"),
        ("phi4_mini", "<|endoftext|>", "<|end|><|user|>"),
    ],
)
def test_only_the_templates_own_stop_closes_a_turn(
    renderers: dict[str, TemplateRenderer], name: str, stop: str, closing: str
):
    renderer = renderers[name]
    (stop_id,) = renderer.ids(stop)
    asked = [Message("user", "And?")]
    bridge = renderer.bridge(asked, [], TurnEnd(stop_id))
    assert renderer.decode(bridge).startswith(closing)
    own = renderer.ids(closing)[0]
    assert renderer.bridge(asked, [], TurnEnd(own)) == bridge[1:]


# Forged control tokens


def spelled(family: Family) -> list[str]:
    """Return the family's delimiters, complete and without their outer signs, and those of all other families."""
    own = delimiters_of(family)
    others = set[str]().union(*map(delimiters_of, FAMILIES)) - own
    return sorted([*own, *(mark[1:-1] for mark in own), *(mark[:-1] for mark in own), " ".join(sorted(others))])


def delimiters_of(family: Family) -> set[str]:
    return {*family.special, *family.markup} - {"/nothink"}  # a switch that users may write


def hostile(family: Family, text: str) -> tuple[list[Message], list[dict[str, Any]]]:
    """Return a conversation and tools with `text` in every untrusted field."""
    fields = {text: text, "type": "string", "description": text, "enum": [text], "deep": {text: {text: text}}}
    function = {"name": "look_up", "description": text, text: text}
    function["parameters"] = {"type": "object", "properties": {f"word{text}": fields}, text: {text: text}}
    call = ToolCall("c00000000", "look_up", {f"word{text}": text})
    has_tools = family.calls is not None and family.name != "deepseek_v3_1"
    asked = [Message("system", "Be brief."), Message("user", text), Message("assistant", "Yes.")]
    if not has_tools:
        return [*asked, Message("user", text)], []
    answers = [Message("tool", text, tool_call_id=call.id, name="look_up")]
    asked[2] = Message("assistant", "", (call,))
    return [*asked, *answers], [{"type": "function", "function": function}]


@pytest.mark.parametrize("name", names)
def test_no_stranger_can_write_a_control_token(renderers: dict[str, TemplateRenderer], name: str):
    family, renderer = FAMILY[name], renderers[name]
    control = {i for mark in delimiters_of(family) for i in renderer.ids(mark)}

    def check(text: str) -> list[int]:
        messages, tools = hostile(family, text)
        ids = renderer.render(messages, tools)
        bridge = renderer.bridge(messages[3:], tools, TurnEnd())
        assert ids[-len(bridge) :] == bridge
        assert text.replace("▁", " ") in renderer.decode(ids).replace("▁", " ")
        return [i for i in ids if i in control]

    harmless = check("plain words")
    for text in spelled(family):
        assert check(text) == harmless, text


@pytest.mark.parametrize("name", names)
def test_system_text_keeps_markup_and_writes_no_control_token(renderers: dict[str, TemplateRenderer], name: str):
    family, renderer = FAMILY[name], renderers[name]

    def counts(system: str) -> dict[str, int]:
        ids = renderer.render([Message("system", system), Message("user", "Hi")], [])
        return {mark: ids.count(renderer.ids(mark)[0]) for mark in (*family.special, *family.markup)}

    plain = counts("Be brief.")
    for mark in sorted(delimiters_of(family)):
        is_markup = mark in family.markup and "|" not in mark and "\uff5c" not in mark
        assert counts(f"Write {mark} first.") == plain | {mark: plain[mark] + is_markup}


# Folders and settings


def test_a_base_model_ends_turns_as_its_template_does(tmp_path: Path):
    """The folder declares only `<|endoftext|>`; the template ends turns with a different token."""
    folder = write_family(tmp_path, "qwen2_5")
    end = json.loads((folder / "generation_config.json").read_text())["eos_token_id"][1]
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_text(json.dumps({"eos_token_id": end}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    renderer = TemplateRenderer.from_directory(folder)
    assert renderer.facts.stop_tokens == ("<|endoftext|>", "<|im_end|>")
    bridge = renderer.decode(renderer.bridge([Message("user", "And?")], [], TurnEnd(end)))
    assert bridge.startswith("<|im_end|>\n<|im_start|>user\nAnd?")
    chosen = TemplateRenderer.from_directory(folder, RenderSettings(stop_tokens=("<|im_end|>",)))
    assert chosen.facts.stop_tokens == ("<|im_end|>",)
    with pytest.raises(TemplateError, match="stop token '<end>' is not in the tokenizer"):
        TemplateRenderer.from_directory(folder, RenderSettings(stop_tokens=("<end>",)))


def test_a_folder_without_a_tokenizer_is_refused_with_the_names_of_its_files(tmp_path: Path):
    folder = write_family(tmp_path, "kimi_k2")
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(
        TemplateError, match=r"tokenizer.json does not exist, and the folder has no tekken.json or tiktoken.model"
    ):
        TemplateRenderer.from_directory(folder)


@pytest.mark.parametrize("name", names)
@pytest.mark.parametrize("begun", ["Ein Bau aus", "Zeile\n\n- ♜ <b>", "1. "])
def test_a_reply_that_is_begun_ends_the_prompt_as_transformers_has_it(
    folders: dict[str, Path], renderers: dict[str, TemplateRenderer], name: str, begun: str
):
    family, renderer = FAMILY[name], renderers[name]
    messages = [Message("user", "Was ist ein Turm?"), Message("assistant", begun)]
    expected = Reference(family, folders[name]).begun(messages)
    # transformers drops a trailing space where the template would drop it; a continued reply keeps it.
    expected += begun[len(begun.rstrip()) :] if not expected.endswith(begun) else ""
    assert expected.endswith(begun)
    assert renderer.render(messages, [], is_open=True) == Reference(family, folders[name]).ids(expected)
