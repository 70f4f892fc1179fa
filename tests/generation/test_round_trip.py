"""The template check of a model's chat format, over every supported model family."""

from __future__ import annotations

import pytest

from agentloop.errors import ParserMismatch
from agentloop.generation.round_trip import parsers_that_fit, round_trip_test
from agentloop.parsers.by_name import PARSER_NAMES, choose_parser, get_parser
from agentloop.rendering.renderer import OnUnstable, RenderSettings, TemplateRenderer
from tests.support.families.table import FAMILIES, FAMILY, Family, write_family

SAME_SYNTAX = {"qwen3_xml": {"qwen3_xml", "qwen3_coder"}}
# The template renders no tools.
WITH_CALLS = [family for family in FAMILIES if family.calls and family.name != "deepseek_v3_1"]


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TemplateRenderer]:
    settings = RenderSettings(on_unstable=OnUnstable.FORK)
    folder = tmp_path_factory.mktemp("families")
    return {
        family.name: TemplateRenderer.from_directory(write_family(folder / family.name, family.name), settings)
        for family in FAMILIES
    }


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_chosen_parser_reads_its_family(renderers: dict[str, TemplateRenderer], family: Family):
    renderer = renderers[family.name]
    name = choose_parser(renderer.facts.template_source, renderer.facts.literals)[0] or "hermes"
    test = round_trip_test(renderer, get_parser(name), name)
    assert bool(test.call_text) == renderer.facts.supports_tools
    assert test.opens_reasoning == family.opens_reasoning
    assert ("look_up" in test.call_text) == bool(test.call_text)


@pytest.mark.parametrize("family", WITH_CALLS, ids=lambda family: family.name)
def test_parsers_of_other_families_are_refused(renderers: dict[str, TemplateRenderer], family: Family):
    renderer = renderers[family.name]
    fitting = SAME_SYNTAX.get(family.calls or "", {family.calls})
    assert set(parsers_that_fit(renderer)) == fitting
    wrong = next(name for name in PARSER_NAMES if name not in fitting)
    with pytest.raises(ParserMismatch):
        round_trip_test(renderer, get_parser(wrong), wrong)


@pytest.mark.parametrize(
    ("family", "shown", "fitting"),
    [
        ("llama3_1", '{"name": "look_up", "parameters"', "no call instead of look_up"),
        ("qwen3_coder", "<function=look_up>", "a malformed call"),
    ],
)
def test_a_mismatch_names_parser_text_and_those_that_fit(renderers, family: str, shown: str, fitting: str):
    with pytest.raises(ParserMismatch) as caught:
        round_trip_test(renderers[family], get_parser("hermes"), "hermes")
    message = caught.value.message
    assert "'hermes'" in message
    assert shown in message
    assert fitting in message
    assert message.endswith(f"parsers that read it: {', '.join(parsers_that_fit(renderers[family]))}")
    assert FAMILY[family].calls in message


@pytest.mark.parametrize(
    ("family", "kwargs", "thoughts"),
    [("qwen3", {}, True), ("qwen3", {"enable_thinking": False}, False), ("qwen2_5", {}, False)],
)
def test_thoughts_are_read_where_the_prompt_leaves_room_for_them(tmp_path, family, kwargs, thoughts):
    settings = RenderSettings(kwargs=kwargs)
    renderer = TemplateRenderer.from_directory(write_family(tmp_path, family), settings)
    test = round_trip_test(renderer, get_parser("hermes"), "hermes")
    assert test.call_text
    assert test.reasoning == thoughts
