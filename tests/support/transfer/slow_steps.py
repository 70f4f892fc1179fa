"""Slows the steps of a real vLLM engine: `WorkerMethod.EXTEND_RUNNER` calls `install` in its workers."""

from __future__ import annotations

import time
from typing import Any


def install(runner: Any, seconds: str) -> None:
    """Make each step of this model runner take `seconds` longer than the step before the first call did."""
    execute = getattr(runner, "unslowed_execute_model", runner.execute_model)

    def execute_model(*arguments: Any, **options: Any) -> Any:
        time.sleep(float(seconds))
        return execute(*arguments, **options)

    runner.unslowed_execute_model, runner.execute_model = execute, execute_model
