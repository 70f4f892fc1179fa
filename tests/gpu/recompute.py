"""How far the recorded logprobs of a run of the shipped policy are from transformers' on the named versions.

python -m tests.gpu.recompute runs/latest/trajectories.parquet
"""

from __future__ import annotations

import sys

import numpy as np
import pyarrow.parquet as pq

from tests.servers.recompute import difference


def main(path: str, num_trajectories: int = 200) -> None:
    """Print the mean absolute differences, under the named version and under the other one."""
    rows = pq.read_table(path).to_pylist()
    mixed = [row for row in rows if len({span["version"] for span in row["weight_versions"]}) > 1]
    chosen = (mixed + rows)[:num_trajectories]
    found = [difference(row) for row in chosen]
    named, other = (np.concatenate([getattr(one, name) for one in found]).mean() for name in ("named", "other"))
    print(
        f"{len(chosen)} trajectories, {min(len(mixed), len(chosen))} of both versions: mean |recorded - recomputed|"
    )
    print(f"  {named:.4f} under the named version, {other:.4f} under the other")


if __name__ == "__main__":
    main(sys.argv[1])
