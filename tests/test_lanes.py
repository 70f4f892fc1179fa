"""`make test` runs all of its lanes, and its last line lists the skipped tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import lanes

CASES = """
import pytest
def test_a_package(): pytest.skip("needs bubblewrap (apt: bubblewrap)")
def test_an_engine(): pytest.skip("this engine cannot sleep")
"""
MODULE = "import pytest\npytest.importorskip('nosuchpackage')"


def test_a_lane_runs_after_one_that_failed_and_the_last_line_names_what_is_missing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # their imports take most of the time
    files = {"failing": "def test_it(): assert False", "skipping": CASES, "importing": MODULE, "other": ""}
    for name, text in files.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    arguments = {
        name: ["-c/dev/null", f"--rootdir={tmp_path}", str(tmp_path / f"test_{name}.py")] for name in files
    }
    assert not lanes.run(arguments, ["-q", "-pno:cacheprovider"])
    assert capfd.readouterr().out.splitlines()[-1] == (
        "lanes: failing FAILED, skipping passed, importing passed, other passed; "
        "1 skipped because an engine or a case lacks a capability; "
        "1 skipped: could not import 'nosuchpackage': No module named 'nosuchpackage'; "
        "1 skipped: needs bubblewrap (apt: bubblewrap)"
    )


def test_the_lanes_of_a_mark_have_its_files() -> None:
    assert "tests/servers/cli/test_doctor.py" not in lanes.files_with("ray")
    for mark in ("engine", "ray"):
        files = lanes.files_with(mark)
        assert len(files) > 5
        assert set(files) < set(lanes.lanes()[mark])
