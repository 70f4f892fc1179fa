"""Published versions for tests: a trainer's weights, and a publisher written from the documented format alone."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import blake3
import numpy as np
import xxhash
import zstandard

from agentloop.client.publish import TensorBytes

Tensors = dict[str, np.ndarray]
RUN = "run-1"
HASHES: Mapping[str, Callable[[bytes], str]] = {
    "xxh3-128": xxhash.xxh3_128_hexdigest,
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}


def policy(seed: int = 0, rows: int = 300) -> Tensors:
    """Return weights as the bits of bf16, with one tensor larger than a chunk."""
    rng = np.random.default_rng(seed)
    return {f"layer.{i}": rng.integers(0, 2**14, (rows, 32 + 500 * i), np.uint16) for i in range(4)}


def train(weights: Tensors, rng: np.random.Generator, share: float = 0.03) -> None:
    """Change a share of the values by their last bit, in place; one tensor stays unchanged."""
    for tensor in list(weights.values())[1:]:
        tensor ^= (rng.random(tensor.shape) < share).astype(np.uint16)


def given(weights: Tensors) -> list[TensorBytes]:
    """Return the weights in the form that a publisher accepts."""

    def tensor(name: str, value: np.ndarray) -> TensorBytes:
        return TensorBytes(name, "bfloat16", value.shape, lambda: value.reshape(-1).view(np.uint8))

    return [tensor(name, value) for name, value in weights.items()]


def held(folder: Path) -> dict[str, bytes]:
    """Return the bytes of each tensor of a checkpoint."""
    found = {}
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                first, end = entry["data_offsets"]
                found[name] = data[start + first : start + end]
    return found


def bytes_of(weights: Tensors) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in weights.items()}


def write_file(
    path: Path, tensors: Mapping[str, tuple[str, list[int], bytes]], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values()))


def publish_plainly(
    store: Path, version: int, new: Tensors, old: Tensors | None, encoding: str = "xor", checksum: str = "xxh3-128"
) -> Path:
    """Publish as another trainer would, by the documented format, without our additions.

    Returns the version's folder.
    """
    folder = store / RUN / f"weight_v{version:06d}"
    folder.mkdir(parents=True)
    index: dict[str, object] = {"version": f"{version:06d}"}
    name = "model-00001-of-00001.safetensors"
    if old is None:
        tensors = {key: ("BF16", list(value.shape), value.tobytes()) for key, value in new.items()}
        metadata = {"format": "pt"}
    else:
        index |= {"base_version": f"{version - 1:06d}", "delta_encoding": encoding, "compression_format": "zstd"}
        index |= {"checksum_format": checksum}
        changed = {key: value for key, value in new.items() if not np.array_equal(value, old[key])}
        packed = {key: zstandard.compress(_delta(value, old[key], encoding)) for key, value in changed.items()}
        tensors = {key: ("U8", [len(data)], data) for key, data in packed.items()}
        metadata = {key: HASHES[checksum](value.tobytes()) for key, value in changed.items()}
    write_file(folder / name, tensors, metadata)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": index, "weight_map": dict.fromkeys(tensors, name)})
    )
    (store / RUN / "latest").write_text(f"{RUN}/weight_v{version:06d}")
    return folder


def _delta(new: np.ndarray, old: np.ndarray, encoding: str) -> bytes:
    after, before = np.frombuffer(new.tobytes(), np.uint8), np.frombuffer(old.tobytes(), np.uint8)
    if encoding == "xor":
        return (after ^ before).tobytes()
    places = np.flatnonzero(after != before).astype("<u4")
    return np.array([len(places)], "<u4").tobytes() + places.tobytes() + after[places].tobytes()
