"""The doctor's verdict on model folders of every family, and on configs that a service would refuse."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentloop_servers.cli.doctor import app, examine
from tests.support.families.table import FAMILIES, write_family

THINK = "<think> </think>"
OPENED = f"{THINK}, opened by the prompt"

# Per family: its parser, its reasoning format, and the conversations that fork instead of being bridged.
VERDICTS: dict[str, tuple[str, str, set[str]]] = {
    "qwen2_5": ("hermes", "not written", set()),
    "qwen3": ("hermes", THINK, set()),
    "qwen3_instruct_2507": ("hermes", "not written", set()),
    "qwen3_thinking_2507": ("hermes", OPENED, set()),
    "qwen3_coder": ("qwen3_xml", "not written", set()),
    "qwen3_5": ("qwen3_xml", OPENED, set()),
    "qwen3_6": ("qwen3_xml", OPENED, set()),
    "llama3_1": ("llama3_json", "not written", set()),
    "llama3_2": ("llama3_json", "not written", set()),
    "deepseek_r1": ("deepseek_v3", OPENED, set()),
    "deepseek_v3_1": ("deepseek_v31", "not written", set()),
    "glm4_5": ("glm45", THINK, set()),
    "kimi_k2": ("kimi_k2", "not written", set()),
    "mistral_small_3_1": ("mistral", "not written", {"user, with tools"}),
    "mistral_small_3_2": ("mistral", "not written", {"user, with tools"}),
    "nemotron_3": ("qwen3_xml", OPENED, set()),
    "gpt_oss": ("harmony", "<|channel|>analysis<|message|> <|end|>", {"user, with tools", "user, no tools"}),
    "gemma3": ("none", "not written", set()),
    "phi4_mini": ("none", "not written", set()),
}

runner = CliRunner()


def a_model(folder: Path, family: str) -> Path:
    """Return a model folder of the family, with the context length that a service requires."""
    write_family(folder, family)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    return folder


def verdict(folder: Path, *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the exit code, and the checks by name."""
    result = runner.invoke(app, ["doctor", "--model", str(folder), "--json", *arguments])
    report = json.loads(result.output)
    assert report["ok"] == (result.exit_code == 0)
    return result.exit_code, {check["name"]: check for check in report["checks"]}


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_every_family_has_its_verdict(tmp_path: Path, family: str) -> None:
    exit_code, checks = verdict(a_model(tmp_path, family))
    parser, thoughts, forks = VERDICTS[family]
    assert exit_code == 0
    assert checks["parser"]["detail"].startswith(f"{parser}: ")
    assert checks["reasoning"]["detail"] == thoughts
    assert {name for name, check in checks.items() if check["detail"].startswith("fork: ")} == forks
    assert checks["self-test"]["is_ok"]


def test_tools_that_are_off_are_no_fault_and_told(tmp_path: Path) -> None:
    exit_code, checks = verdict(a_model(tmp_path, "gemma4"))
    assert exit_code == 0
    assert checks["parser"]["detail"].startswith("none: ")
    assert not checks["tools"]["is_ok"]
    assert checks["tools"]["detail"].startswith("refused: no parser reads its calls")
    assert "tools' answers" not in checks
    exit_code, checks = verdict(a_model(tmp_path / "asked", "qwen3"), "--parser", "none")
    assert (exit_code, checks["parser"]["detail"]) == (0, "none: it is configured")
    assert checks["reasoning"]["detail"] == THINK


@pytest.mark.parametrize(
    ("family", "arguments", "where", "said"),
    [
        ("llama3_1", ["--parser", "hermes"], "parser", "parsers that read it: llama3_json"),
        ("qwen3_coder", ["--parser", "hermes"], "parser", "parsers that read it: qwen3_xml, qwen3_coder"),
        ("qwen3", ["--parser", "nonsense"], "parser", "unknown parser 'nonsense'"),
        ("qwen3", ["--renderer", "nonsense"], "chat format", "'nonsense' is not an import path"),
    ],
)
def test_what_a_service_would_refuse_is_broken(
    tmp_path: Path, family: str, arguments: list[str], where: str, said: str
) -> None:
    exit_code, checks = verdict(a_model(tmp_path, family), *arguments)
    assert exit_code == 1
    assert not checks[where]["is_ok"]
    assert said in checks[where]["detail"]


def test_a_folder_without_a_model_or_a_template_is_named(tmp_path: Path) -> None:
    exit_code, checks = verdict(tmp_path / "absent")
    assert exit_code == 1
    assert "no model at" in checks["model"]["detail"]
    folder = a_model(tmp_path / "bare", "qwen3")
    (folder / "chat_template.jinja").unlink()
    exit_code, checks = verdict(folder)
    assert exit_code == 0
    assert not checks["chat format"]["is_ok"]
    assert "chat.template.file" in checks["chat format"]["detail"]
    assert {"parser", "tools", "self-test"}.isdisjoint(checks)


def test_a_configs_chat_settings_count(tmp_path: Path) -> None:
    config = tmp_path / "service.yaml"
    chat = {"stop_tokens": ["<|endoftext|>", "<|im_end|>"], "template": {"kwargs": {"enable_thinking": False}}}
    args = {"model": str(a_model(tmp_path / "model", "qwen3")), "chat": chat}
    config.write_text(json.dumps({"applications": [{"args": args}]}))  # JSON is YAML
    result = runner.invoke(app, ["doctor", "--config", str(config)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    rows = {line[1:18].strip(): line[22:].strip() for line in result.output.splitlines()}
    assert rows["stop tokens"].startswith("<|endoftext|> ")
    assert rows["reasoning"] == "not written"
    assert rows["self-test"] == "an answer, a call: rendered and parsed again"


def test_the_doctor_needs_neither_ray_nor_an_engine(tmp_path: Path) -> None:
    program = (
        "import sys; sys.argv = ['agentloop', 'doctor', '--model', sys.argv[1]]\n"
        "import agentloop_servers.cli as cli\n"
        "try: cli.main()\n"
        "finally: print(sorted({'ray', 'vllm', 'torch', 'transformers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program, str(a_model(tmp_path, "qwen3"))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "self-test" in result.stdout
    assert result.stdout.rstrip().endswith("[]")


@cache
def packages_asked_for() -> list[Distribution]:
    """Return the installed packages that the doctor checks."""
    return [found for found in distributions() if found.name.startswith(("ray", "torch", "vllm"))]


@pytest.fixture
def few_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide hundreds of packages: reading the files of all of them takes a second per verdict."""

    def found() -> Iterator[Distribution]:
        yield from packages_asked_for()
        yield from distributions(path=[str(tmp_path / "packages")])

    monkeypatch.setattr(importlib.metadata, "distributions", found)


@pytest.mark.usefixtures("few_packages")
@pytest.mark.parametrize(("mode", "is_ok"), [(None, True), ("token", True), ("disabled", False)])
def test_62_a_ray_without_its_token_is_flagged(
    monkeypatch: pytest.MonkeyPatch, mode: str | None, is_ok: bool
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    [check] = [check for check in json.loads(result.stdout)["checks"] if check["name"] == "ray's token"]
    assert check["is_ok"] is is_ok


def a_package(folder: Path, name: str, distribution: str, version: str) -> None:
    """An installed package that can be found and that raises when it is imported."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text("raise SystemError")
    facts = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (facts / "top_level.txt").write_text(f"{name}\n")


@pytest.mark.usefixtures("few_packages")
@pytest.mark.parametrize(
    ("version", "has_gpu", "has_kernels", "said"),
    [
        (None, True, True, "not installed"),
        (
            *("0.5.18", True, True),
            "sglang 0.5.18; the adapter is tested with 0.5.17 and 0.5.23; "
            "to start it anyway, set `allow_untested: true` in `engine`",
        ),
        ("0.5.17", False, True, "sglang 0.5.17; its wheels run on NVIDIA GPUs only"),
        ("0.5.17", True, False, "sglang 0.5.17, its kernels: not installed"),
        ("0.5.17", True, True, "sglang 0.5.17, its kernels: sglang-kernel 0.4.5"),
        ("0.5.23", True, True, "sglang 0.5.23, its kernels: sglang-kernel 0.4.5"),
    ],
)
def test_sglang_is_judged_by_its_version_its_kernels_and_the_gpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str | None,
    has_gpu: bool,
    has_kernels: bool,
    said: str,
) -> None:
    packages, commands = tmp_path / "packages", tmp_path / "commands"
    if version is not None:
        a_package(packages, "sglang", "sglang", version)
    if has_kernels:
        a_package(packages, "sgl_kernel", "sglang-kernel", "0.4.5")
    commands.mkdir()
    if has_gpu:
        (commands / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA H100, 81559 MiB'\n")
        (commands / "nvidia-smi").chmod(0o755)
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setenv("PATH", str(commands))
    check = next(check for check in examine() if check.name == "sglang")
    assert check.detail == said
    assert check.is_ok == (version in ("0.5.17", "0.5.23") and has_gpu and has_kernels)
    assert not check.is_needed
