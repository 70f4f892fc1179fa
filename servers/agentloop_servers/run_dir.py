"""The directory of a run: how a new one is named, and the secret that its processes share."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path


def run_secret(run_dir: Path) -> str:
    """The secret of a run, made at its first start: what is deployed again knows the keys of its sessions."""
    path = run_dir / "secret"
    with suppress(FileExistsError):
        run_dir.mkdir(parents=True, exist_ok=True)
        made = path.with_suffix(f".{secrets.token_hex(4)}")
        made.touch(mode=0o600)
        made.write_text(secrets.token_hex(16))
        try:
            os.link(made, path)  # never half-written, and the first of two wins
        finally:
            made.unlink()
    return path.read_text()


def new_run_dir(parent: Path) -> Path:
    """A new directory under `parent`, named by the time and a few random digits."""
    path = parent / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    path.mkdir(parents=True)
    return path
