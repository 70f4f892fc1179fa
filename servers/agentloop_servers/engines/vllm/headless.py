"""One host's part of a vLLM engine that spans hosts: `python -m agentloop_servers.engines.vllm.headless CONFIG`.

Like `vllm serve --headless`, it runs vLLM's executor without a scheduler; host 0's scheduler controls its workers.
It exits when a worker exits.

Start it as the leader of a process group, with a pipe on stdin. A guard process in the group kills the group when
the pipe closes, that is when the parent exits: a worker that waits for a lost host in a collective operation would
not detect this. The guard is a grandchild of the parent, because Ray kills the direct children of its actors.
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
    """Return the command that starts this process."""
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
    sys.exit("a vLLM worker on this host has exited")


def guard() -> NoReturn:
    """Kill the process group when stdin closes."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGTERM)
    time.sleep(_GRACE_S)
    os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()
