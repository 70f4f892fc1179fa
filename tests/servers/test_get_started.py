"""The programs of docs/get-started, run against the whole service with simulated engines."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from tests.support.service.whole_service import simulated_config, whole_service

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("page", "shown"), [("first-agent", "["), ("first-trainer", "1 ")])
async def test_the_program_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str, shown: str
) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "get-started" / f"{page}.md").read_text()
    [program] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    program, run = program.split("asyncio.run(main())")
    assert not run.strip()
    async with whole_service(simulated_config(mode="standalone"), tmp_path) as url:
        printed: list[str] = []
        names = {"print": lambda *values: printed.append(" ".join(map(str, values)))}
        exec(compile(program.replace("http://127.0.0.1:8000", url), page, "exec"), names)
        await asyncio.wait_for(names["main"](), 60)
    assert printed
    assert shown in printed[-1]
