"""SGLang's own code on a CPU, for tests: torch replaces the GPU parts of its wheel.

With this folder first in PYTHONPATH and SGLANG_USE_CPU_ENGINE=1, Python imports this module in every process.
SGLang's code is the real one: its scheduler, radix cache, tokenizer manager, sampler, `torch_native` attention and
models, which have torch implementations. Only the two page allocators are replaced, because they are Triton kernels
that need a GPU. Functions of `sgl_kernel` refuse to run. Models of other families are not imported, and nothing is
compiled: that would take twelve seconds, and thirty more at the first request.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

MODELS = ("qwen2", "qwen3")  # the shipped policy is qwen3, which imports qwen2
VISION_OPERATOR = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class Kernel:
    """A function that is called like a Triton kernel: `kernel[grid](...)`."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._function


def alloc_extend(
    prefix_lens: Any, seq_lens: Any, last_loc: Any, free_pages: Any, out: Any, _batch: int, page: int
) -> None:
    """Write the slots of each request's new tokens: the rest of its last page, then free pages in order."""
    import torch

    slots, used = [], 0
    for prefix, end, last in zip(prefix_lens.tolist(), seq_lens.tolist(), last_loc.tolist(), strict=True):
        num_in_page = min(end, -(-prefix // page) * page) - prefix
        num_fresh = end - prefix - num_in_page
        num_pages = -(-num_fresh // page)
        pages = free_pages[used : used + num_pages]
        used += num_pages
        slots.append(torch.arange(last + 1, last + 1 + num_in_page))
        slots.append((pages[:, None] * page + torch.arange(page)).reshape(-1)[:num_fresh])
    if used <= len(free_pages):  # the caller counts too, and discards the output if pages are short
        out.copy_(torch.cat(slots))


def alloc_decode(seq_lens: Any, last_loc: Any, free_pages: Any, out: Any, _batch: int, page: int) -> None:
    """Write one slot per request: the slot after its last one, or the first slot of a free page."""
    is_fresh = (seq_lens - 1) % page == 0
    if int(is_fresh.sum()) <= len(free_pages):
        out.copy_(last_loc + 1)
        out[is_fresh] = free_pages[: int(is_fresh.sum())].to(out.dtype) * page


def _replace_allocators(module: ModuleType) -> None:
    module.alloc_extend_kernel = Kernel(alloc_extend)  # type: ignore[attr-defined]
    module.alloc_decode_kernel = Kernel(alloc_decode)  # type: ignore[attr-defined]


def _declare_operators() -> None:
    """Declare two operators that torchvision's CUDA wheel describes and that torch for CPU does not have."""
    import torch

    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", VISION_OPERATOR)


class AtImport:
    """A finder that acts before torchvision is imported, and after SGLang's allocators are."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name == "torchvision":
            _declare_operators()
        if name != "sglang.kernels.ops.memory.allocator":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _replace_allocators(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _unused_models() -> str:
    """Return the names of SGLang's unneeded model modules, in the form of its environment variable."""
    sglang = importlib.util.find_spec("sglang")
    if sglang is None or sglang.origin is None:
        return ""
    models = Path(sglang.origin).parent / "srt" / "models"
    return ",".join(sorted(file.stem for file in models.glob("*.py") if file.stem not in MODELS))


if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    sys.meta_path.insert(0, AtImport())  # type: ignore[arg-type]
    os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", _unused_models())
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
