"""A fault inside an engine's worker: a parameter that is replaced between an update's stage and its commit."""

from __future__ import annotations

from typing import Any


def replace_parameter(owner: Any, argument: str) -> None:
    """Give the first parameter of the served model other memory, with the same values.

    `owner` is vLLM's model runner (`extend_runner`) or SGLang's scheduler (`scheduler_extend`).
    """
    runner = owner.tp_worker.model_runner if hasattr(owner, "tp_worker") else owner
    parameter = next(runner.model.parameters())
    parameter.data = parameter.data.clone()
