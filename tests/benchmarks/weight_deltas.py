"""What a published delta costs: its size, and the time to make and to apply it, beside its own parts alone.

    python -m tests.benchmarks.weight_deltas --mib 256

A checkpoint of random bf16 is changed in 0.5 %, 3 % and 100 % of its bytes (the low byte of values, as small steps
change; at 100 % every byte), published in both encodings, and applied: in memory beside the sum of decompressing,
XOR or scattering and hashing alone, all in one thread; and on the disk, synced, beside a plain copy that is synced.
Each time is the least of `--repeats`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import zstandard
from rich.console import Console
from rich.table import Table

from agentloop.client.publish import PublishOptions, TensorBytes
from agentloop_servers.weight_store.format import CHECKSUMS, Encoding, apply_delta, read_files
from agentloop_servers.weight_store.local_versions import LocalVersions
from agentloop_servers.weight_store.publisher import VersionPublisher
from agentloop_servers.weight_store.store import VersionStore, folder_of, sync_path
from agentloop_servers.weight_transfer.checkpoint import READ_CHUNK_BYTES

SHARES = (0.005, 0.03, 1.0)
NUM_TENSORS = 8
RUN = "bench"
Tensors = dict[str, np.ndarray]


def least_s(work: Callable[[], object], repeats: int) -> float:
    """The least time of several runs."""
    times = []
    for _ in range(repeats):
        started_at = time.perf_counter()
        work()
        times.append(time.perf_counter() - started_at)
    return min(times)


def checkpoint(mib: int, rng: np.random.Generator) -> Tensors:
    """The bits of normally distributed bf16 values."""
    columns = mib * 2**20 // 2 // NUM_TENSORS // 1024
    return {
        f"w{i}": (rng.standard_normal((1024, columns), np.float32).view(np.uint32) >> 16).astype(np.uint16)
        for i in range(NUM_TENSORS)
    }


def changed(tensors: Tensors, share: float, rng: np.random.Generator) -> Tensors:
    """Weights of which this share of bytes differs."""
    if share == 1.0:
        masks = {name: rng.integers(1, 256, (2, *value.shape), np.uint16) for name, value in tensors.items()}
        return {name: value ^ masks[name][0] ^ (masks[name][1] << 8) for name, value in tensors.items()}
    return {
        name: value ^ (rng.random(value.shape, np.float32) < 2 * share).astype(np.uint16)
        for name, value in tensors.items()
    }


def given(tensors: Tensors) -> list[TensorBytes]:
    def tensor(name: str, value: np.ndarray) -> TensorBytes:
        return TensorBytes(name, "bfloat16", value.shape, lambda: value.reshape(-1).view(np.uint8))

    return [tensor(name, value) for name, value in tensors.items()]


def parts_s(
    old: Tensors, new: Tensors, packed: dict[str, memoryview], encoding: Encoding, repeats: int
) -> list[float]:
    """Decompressing, XOR or scattering, and hashing, each alone and one after another in one thread."""
    chunk = np.empty(READ_CHUNK_BYTES, np.uint8)
    flat_old = [value.reshape(-1).view(np.uint8).copy() for value in old.values()]
    flat_new = [value.reshape(-1).view(np.uint8) for value in new.values()]

    def decompress() -> None:
        for frame in packed.values():
            with zstandard.ZstdDecompressor().stream_reader(frame) as reader:
                while reader.readinto(memoryview(chunk)):
                    pass

    differences = [a ^ b for a, b in zip(flat_old, flat_new, strict=True)]
    places = [np.flatnonzero(one).astype("<u4") for one in differences]
    values = [b[at] for b, at in zip(flat_new, places, strict=True)]

    def combine() -> None:
        for i, tensor in enumerate(flat_old):
            if encoding is Encoding.XOR:
                for start in range(0, len(tensor), READ_CHUNK_BYTES):
                    part = tensor[start : start + READ_CHUNK_BYTES]
                    np.bitwise_xor(part, differences[i][start : start + READ_CHUNK_BYTES], out=part)
            else:
                tensor[places[i]] = values[i]

    def hashed() -> None:
        for one in flat_new:
            state = CHECKSUMS["xxh3-128"]()
            for start in range(0, len(one), READ_CHUNK_BYTES):
                state.update(one[start : start + READ_CHUNK_BYTES])

    return [least_s(work, repeats) for work in (decompress, combine, hashed)]


def copied(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for path in source.glob("*.safetensors"):
        shutil.copyfile(path, target / path.name)
        sync_path(target / path.name)


def measure(folder: Path, old: Tensors, share: float, encoding: Encoding, repeats: int) -> list[str]:
    """One row of the table."""
    new = changed(old, share, np.random.default_rng(7))
    publisher = VersionPublisher(PublishOptions(str(folder / "store"), RUN, encoding, cache=str(folder / "cache")))
    publisher.publish(given(old), 1)
    report = publisher.publish(given(new), 2)
    store, host = VersionStore(str(folder / "store"), RUN), LocalVersions(folder / "host")
    host.folder(store, 1)
    index = store.index(2)
    packed = read_files(folder / "store" / RUN / folder_of(2), index)
    parts = parts_s(old, new, {name: memoryview(one.read()) for name, one in packed.items()}, encoding, repeats)
    apply_times = []
    for _ in range(repeats):
        tensors = {name: value.reshape(-1).view(np.uint8).copy() for name, value in old.items()}
        work = [partial(apply_delta, index, packed[name], one) for name, one in tensors.items()]
        started_at = time.perf_counter()
        for step in work:
            step()
        apply_times.append(time.perf_counter() - started_at)
    whole_times = []
    for _ in range(repeats):
        shutil.rmtree(folder / "host" / folder_of(2), ignore_errors=True)
        whole_times.append(least_s(lambda: host.folder(store, 2), 1))
    copy_s = least_s(lambda: copied(folder / "host" / folder_of(1), folder / "copy"), repeats)
    gib = report.num_full_bytes / 2**30
    numbers = [report.encode_s, *parts, sum(parts), min(apply_times), min(whole_times), copy_s]
    return [
        f"{share:.1%}",
        encoding.value,
        f"{report.num_bytes / report.num_full_bytes:.2%}",
        *(f"{number / gib:.2f}" for number in numbers),
        f"{min(apply_times) / sum(parts):.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    old = checkpoint(options.mib, np.random.default_rng(0))
    times = ("encode", "unpack", "combine", "hash", "parts", "apply", "host", "copy")
    columns = ("changed", "encoding", "size", *times, "apply/parts")
    table = Table(*columns, title=f"seconds a GiB of checkpoint; {options.mib} MiB, {NUM_TENSORS} tensors")
    for share in options.shares:
        for encoding in Encoding:
            with tempfile.TemporaryDirectory() as folder:
                table.add_row(*measure(Path(folder), old, share, encoding, options.repeats))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
