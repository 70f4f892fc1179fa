"""Import paths: supported forms, and failures, which are always an InvalidRequest that names the field."""

from __future__ import annotations

import os.path
from pathlib import Path

import pytest

from agentloop.errors import InvalidRequest
from agentloop.plugins import resolve


def test_resolves_an_attribute_and_reaches_into_it() -> None:
    assert resolve("os:path.join", param="loop") is os.path.join
    assert resolve("os.path:join", param="loop") is os.path.join


@pytest.mark.parametrize(
    "path",
    ["", "os", "os:", ":join", "os.path.join", "os:path:join", "os:__import__('x')", "../os:x", "os :path", "ös:x"],
)
def test_bad_syntax_is_refused(path: str) -> None:
    with pytest.raises(InvalidRequest, match=r"expected the form package\.module:attribute") as caught:
        resolve(path, param="loop")
    assert caught.value.param == "loop"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("no_such_package.loops:Loop", "no module named 'no_such_package'"),
        ("os.no_such:Loop", "no module named 'os.no_such'"),
        ("os:no_such", "module 'os' has no attribute 'no_such'"),
        ("os:path.no_such", "module 'os' has no attribute 'path.no_such'"),
    ],
)
def test_what_is_missing_is_named(path: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text) as caught:
        resolve(path, param="reward")
    assert caught.value.param == "reward"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("raise ValueError('broken')", "ValueError: broken"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("def (", "SyntaxError"),
        ("import no_such_dependency", "no module named 'no_such_dependency'"),
    ],
)
def test_a_module_that_fails_to_import_is_the_callers_error(
    source: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_user_module.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidRequest, match=text):
        resolve("broken_user_module:Loop", param="loop")
