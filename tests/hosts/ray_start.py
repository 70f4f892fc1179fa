"""`ray start` with the longer timeouts of the service's own start:

`python -m tests.hosts.ray_start start --head ...`.
"""

from __future__ import annotations

import os
import sys
from functools import partial

from ray.scripts.scripts import main

from agentloop_servers.cluster.ray_start import PATIENCE, PatientNode, RayStart, nodes_made_by

if __name__ == "__main__":
    for name, value in PATIENCE.items():
        os.environ.setdefault(name, value)
    sys.argv[0] = "ray"
    with nodes_made_by(partial(PatientNode, RayStart(print))):
        main()
