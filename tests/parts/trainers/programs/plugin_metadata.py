"""Metadata of an installed `agentloop-rollouts`, where verl finds plugins: the checkout is only on the path."""

from __future__ import annotations

import sys
import tempfile
import tomllib
from pathlib import Path

GROUP = "verl.plugins"

_project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
_folder = Path(tempfile.mkdtemp()) / "agentloop_rollouts-0.dist-info"
_folder.mkdir()
(_folder / "METADATA").write_text("Metadata-Version: 2.1\nName: agentloop-rollouts\nVersion: 0\n")
_lines = [f"{name} = {module}" for name, module in _project["entry-points"][GROUP].items()]
(_folder / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *_lines]))
sys.path.insert(0, str(_folder.parent))
