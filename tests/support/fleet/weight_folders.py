"""Folders of weights and adapters that a trainer rewrites under the same name, also while an engine reads them."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from itertools import count
from pathlib import Path
from random import Random

import orjson
import xxhash

from agentloop.engine.weight_digest import FolderContents, content_digest, read_files
from tests.support.fleet.disk import damage

FILES = ("a.safetensors", "b.safetensors")


class WeightFolders:
    """All folders of one schedule. Every content has its own number."""

    def __init__(self, root: Path, rng: Random) -> None:
        self._root = root
        self._rng = rng
        self._new_numbers = count(1)
        self._numbers = dict[str, int]()  # the number of each digest that a folder has had
        self.num_reads = Counter[str]()  # successful reads by folder
        self._rewrites = set[str]()  # the folders that are rewritten during their next read

    def write(self, directory: str, number: int | None = None) -> None:
        """Replace the files of a folder, by default by new content.

        A new inode each: a write within the clock's tick changes no mtime.
        """
        number = next(self._new_numbers) if number is None else number
        Path(directory).mkdir(parents=True, exist_ok=True)
        tensors = dict[str, tuple[str, list[int], str]]()
        for file in FILES:
            entries = {file[0]: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
            header, data = orjson.dumps(entries), number.to_bytes(4, "little")
            (part := Path(directory) / "part").write_bytes(len(header).to_bytes(8, "little") + header + data)
            os.replace(part, Path(directory) / file)
            tensors[file[0]] = "F32", [1], xxhash.xxh3_128_hexdigest(data)
        self._numbers[content_digest(tensors, directory)] = number

    def folder_of(self, name: str) -> str:
        """Return the folder of a version; it is written if it is new."""
        directory = str(self._root / name)
        if not Path(directory).exists():
            self.write(directory)
        return directory

    def damage(self, directory: str) -> None:
        """Damage a file in a folder."""
        damage(Path(directory) / self._rng.choice(FILES), self._rng)

    def rewrite_during_read(self, directory: str) -> None:
        """Replace a folder's content during the next read by an engine."""
        self._rewrites.add(directory)

    def restore(self, directory: str, digest: str) -> None:
        """Restore the content with this digest, as the folder's owner does after a mistake."""
        self._rewrites.discard(directory)
        if digest in self._numbers:
            self.write(directory, self._numbers[digest])

    def has(self, directory: str) -> bool:
        """Return True for a folder that `folder_of` has made."""
        return Path(directory).parent == self._root

    def is_known(self, digest: str) -> bool:
        """Return True if a folder had this content at any time."""
        return digest in self._numbers

    async def read(self, directory: str) -> FolderContents:
        """Read a folder as an engine does."""
        is_rewritten = directory in self._rewrites
        self._rewrites.discard(directory)

        async def rewrite() -> None:
            for _ in range(self._rng.randint(0, 3) if is_rewritten else 0):
                await asyncio.sleep(0)
            if is_rewritten:
                self.write(directory)

        contents, _ = await asyncio.gather(read_files(directory), rewrite())
        self.num_reads[directory] += 1
        return contents
