"""One host's part of a vLLM engine over several: `python -m agentloop_servers.engines.vllm.headless CONFIG`.

It does what `vllm serve --headless` does: vLLM's executor without a scheduler, whose workers obey that of host 0.
It ends when a worker has ended.

Start it as the leader of a process group, with a pipe on stdin. A guard in the group ends the group when the pipe
ends, so when the process at its other end does: a worker that waits for a lost host within a collective call does
not notice. The guard is a child, because Ray kills the direct children of its actors.
"""

from __future__ import annotations

import base64
import os
import signal
import sys
import time
from typing import NoReturn

from agentloop.values import codec
from agentloop_servers.engines.common.versions import require_driven
from agentloop_servers.engines.vllm.config import VllmConfig, engine_arguments, prepare_environment

_GRACE_S = 3.0


def command(config: VllmConfig) -> list[str]:
    """Return the command of this process."""
    return [sys.executable, "-m", __name__, base64.b64encode(codec.encode(config)).decode()]


def main() -> None:
    config = codec.decode(base64.b64decode(sys.argv[1]), VllmConfig)
    if os.fork() == 0:
        guard()
    prepare_environment(config)
    require_driven("vllm", allow_untested=config.allow_untested)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    vllm_config = AsyncEngineArgs(**engine_arguments(config)).create_engine_config(headless=True)
    MultiprocExecutor(vllm_config, monitor_workers=False).start_worker_monitor(inline=True)
    sys.exit("a worker has ended")


def guard() -> NoReturn:
    """End the process group once stdin ends."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGTERM)
    time.sleep(_GRACE_S)
    os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()
