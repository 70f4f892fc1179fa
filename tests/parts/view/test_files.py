"""The viewer's files: vendored files are the reviewed ones, our code never executes texts, all are small."""

from __future__ import annotations

import gzip
import hashlib
import re

import pytest

from agentloop_view.pages import PAGES_FOLDER

VENDORED = {  # from the packages htm 3.1.1 (standalone, with Preact) and uplot 1.6.32 in their registry
    "preact-htm.js": "72284e8e9079c87817145df1110f74e8a2aa040b2fc384922e18dfcb46fc1fd7",
    "uplot.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
FILES = sorted(file for file in PAGES_FOLDER.iterdir() if file.is_file())
OURS = [file for file in FILES if file.name not in VENDORED]
MAX_BYTES, MAX_PACKED_BYTES, MAX_OUR_LINES = 200_000, 80_000, 1_800

# Code that executes texts or inserts them as markup, or contacts another server. Preact's `on...=` takes a function
# and is allowed.
DANGEROUS = (
    r"\.(inner|outer)HTML|insertAdjacentHTML|dangerouslySetInnerHTML|document\.write|srcdoc",
    r"\beval\(|new Function|set(Timeout|Interval)\([\"'`]|javascript:",
    r"\son\w+=[\"']",
    r"\bstyle=[\"']|<style|<script(?! (src=\"uplot\.js\" defer|type=\"module\" src=\"app\.js\")>)",
    r"https?://(?!www\.w3\.org/2000/svg\")|[\"'(]//",
    r"import\(",
)


def test_what_others_wrote_is_what_was_vetted() -> None:
    assert {name: hashlib.sha256((PAGES_FOLDER / name).read_bytes()).hexdigest() for name in VENDORED} == VENDORED
    assert {file.stem for file in (PAGES_FOLDER / "licences").iterdir()} == {"htm", "preact", "uplot"}


@pytest.mark.parametrize("pattern", DANGEROUS)
def test_ours_makes_no_code_of_texts_and_asks_no_other_server(pattern: str) -> None:
    found = {file.name: re.findall(pattern, file.read_text()) for file in OURS}
    assert {name: parts for name, parts in found.items() if parts} == {}


def test_each_import_is_of_a_name_that_is_exported_and_used() -> None:
    imports = re.compile(r'import \{([^}]*)\} from "\./([\w-]+\.js)"')
    for file in OURS:
        for names, source in imports.findall(file.read_text()):
            text = (PAGES_FOLDER / source).read_text()
            for name in filter(None, (one.strip() for one in names.split(","))):
                assert re.search(rf"export (async )?(function|const) {name}\b|as {name}[,}}]", text), (
                    file.name,
                    name,
                )
                assert len(re.findall(rf"\b{name}\b", file.read_text())) > 1, f"{file.name} does not use {name}"


def test_all_modules_are_asked_for_at_once() -> None:
    page = (PAGES_FOLDER / "index.html").read_text()
    asked = re.findall(r'(?:modulepreload" href|src)="([\w-]+\.js)"', page)
    assert sorted(asked) == sorted(file.name for file in FILES if file.suffix == ".js")


def test_it_is_small() -> None:
    contents = [file.read_bytes() for file in FILES]
    assert sum(map(len, contents)) <= MAX_BYTES
    assert sum(len(gzip.compress(content)) for content in contents) <= MAX_PACKED_BYTES
    scripts = [file.read_text().splitlines() for file in OURS if file.suffix == ".js"]
    styles = [file.read_text().splitlines() for file in OURS if file.suffix == ".css"]
    assert sum(map(len, (*scripts, *styles))) <= MAX_OUR_LINES
    assert max(len(line) for lines in scripts for line in lines) <= 125
