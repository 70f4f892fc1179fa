"""What an install brings: our three import packages and nothing that shadows a user's own folders."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    return zipfile.ZipFile(next(out.glob("*.whl")))


def test_the_wheel_holds_our_packages_and_no_generic_name(wheel):
    top_level = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {
        "agentloop",
        "agentloop_servers",
        "agentloop_tools",
    }
    assert sum(name.endswith("py.typed") for name in wheel.namelist()) == 3


def test_the_command_is_installed(wheel):
    entry_points = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert b"agentloop = agentloop_servers.cli:main" in wheel.read(entry_points)


def test_the_lock_pins_everything_exactly_and_names_no_local_version():
    for lane in ("cpu", "vllm", "sglang", "dev"):
        pins = (ROOT / "requirements" / f"{lane}.txt").read_text().split()
        assert pins, lane
        assert all(pin.count("==") == 1 and "+" not in pin and "@" not in pin for pin in pins), lane
    cpu = (ROOT / "requirements" / "cpu.txt").read_text()
    assert "torch==2.13.0\n" in cpu
    assert not any(name in cpu for name in ("torchvision", "torchaudio", "torchcodec", "nvidia"))


def test_the_engines_are_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["optional-dependencies"]) == {"cpu", "vllm", "sglang"}
    assert not any("vllm" in one or "sglang" in one or "torch" in one for one in project["dependencies"])
