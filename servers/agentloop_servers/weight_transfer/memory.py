"""Where staged weights wait, by one stated rule, and the memory they wait in.

The rule of `auto`: device memory if what is staged, the buffers it arrives through and a reserve of 1 GiB fit
into what is free there; else pinned host memory, if it takes at most two thirds of what the host has available;
else nowhere, and the update goes in one phase. On CPU there is only the host. Memory once taken is kept for the
next update: what fitted once fits always, and pinning gigabytes takes seconds. `release` gives it back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from agentloop.engine import HeldIn

RESERVE_BYTES = 2**30
HOST_SHARE = 2 / 3

Form = Sequence[tuple[str, torch.dtype, tuple[int, ...]]]


class StagingMemory:
    """One set of named tensors at a time."""

    def __init__(self, device: torch.device, policy: str) -> None:
        """`policy`: "auto", "device", "host" or "none"."""
        self._device = device
        self._policy = policy
        self._held_in = HeldIn.NOWHERE
        self._form: Form = ()
        self._tensors: Mapping[str, torch.Tensor] = {}

    def choose(self, form: Form, buffer_bytes: int) -> HeldIn:
        """Where tensors of this form can wait; `buffer_bytes` of device memory are needed beside them."""
        if self._policy == "none":
            return HeldIn.NOWHERE
        if self._tensors and form == self._form:
            return self._held_in
        num_bytes = _num_bytes(form)
        free = _free_device_bytes(self._device) + self._held_bytes(HeldIn.DEVICE)
        is_roomy = num_bytes + buffer_bytes + RESERVE_BYTES <= free
        if self._device.type != "cpu" and (self._policy == "device" or (self._policy == "auto" and is_roomy)):
            return HeldIn.DEVICE
        available = _available_host_bytes() + self._held_bytes(HeldIn.HOST)
        if self._policy == "host" or num_bytes <= HOST_SHARE * available:
            return HeldIn.HOST
        return HeldIn.NOWHERE

    def take(self, form: Form, held_in: HeldIn) -> Mapping[str, torch.Tensor]:
        """Tensors of this form, uninitialised or with what an earlier update left in them."""
        if not self._tensors or form != self._form or held_in is not self._held_in:
            self.release()
            self._tensors = {name: self._empty(dtype, shape, held_in) for name, dtype, shape in form}
            self._form, self._held_in = form, held_in
        return self._tensors

    def release(self) -> None:
        """Give the memory back; whoever still has its tensors must be done with them."""
        had_device_memory = self._held_bytes(HeldIn.DEVICE) > 0
        self._tensors, self._form = {}, ()
        if had_device_memory:
            torch.cuda.empty_cache()

    def _held_bytes(self, held_in: HeldIn) -> int:
        return _num_bytes(self._form) if self._tensors and self._held_in is held_in else 0

    def _empty(self, dtype: torch.dtype, shape: tuple[int, ...], held_in: HeldIn) -> torch.Tensor:
        if held_in is HeldIn.DEVICE:
            return torch.empty(shape, dtype=dtype, device=self._device)
        return torch.empty(shape, dtype=dtype, pin_memory=self._device.type != "cpu")


def _num_bytes(form: Form) -> int:
    return sum(torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in form)


def _free_device_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def _available_host_bytes() -> int:
    """Linux's estimate of what can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
