"""A hook of mkdocs: files of the repository that pages link to are added to the site under `repository/`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add every linked file outside of `docs/`, and the files that its own links name."""
    pending = [file.src_uri for file in files.documentation_pages()]
    while pending:
        page = _path(pending.pop())
        for target, _ in LINK.findall((ROOT / page).read_text()):
            path = os.path.normpath(os.path.join(os.path.dirname(page), target))
            uri = f"repository/{path}"
            if not path.startswith("docs/") and (ROOT / path).is_file() and files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
                if path.endswith(".md"):
                    pending.append(uri)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links out of `docs/`, and those of the added pages, to the files of the site."""
    source = page.file.src_uri
    here = os.path.dirname(_path(source))

    def link(match: re.Match[str]) -> str:
        path = os.path.normpath(os.path.join(here, match[1]))
        if not (ROOT / path).is_file():
            return match[0]
        uri = path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"
        return f"]({os.path.relpath(uri, os.path.dirname(source))}{match[2] or ''})"

    return LINK.sub(link, markdown)


def _path(uri: str) -> str:
    """Return the path in the repository of a source file of the site."""
    return uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"
