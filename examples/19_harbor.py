"""A Harbor task as a rollout, on a host without containers: Harbor's agent, bubblewrap as its environment.

Harbor lives in an environment of its own, of Python 3.12 or later, with bubblewrap and tmux on the PATH:

    agentloop rollout --tasks tasks.jsonl --agent-command "harbor/bin/python examples/19_harbor.py TASKS terminus-2"

A task's id names a folder of TASKS; Harbor's own reward is the session's. The host's programs stand in for
the image: a task's Dockerfile is not built, and its network is the host's.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult

OWN = ("app", "logs", "tests", "solution", "root", "tmp")  # they must exist on the host, as mount points
SHOWN = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}  # no keys for the policy


class Bubblewrap(BaseEnvironment):
    """The host's files, read-only, and writable folders of the trial's own."""

    @staticmethod
    def type() -> str:
        return "bubblewrap"

    def _validate_definition(self) -> None:
        pass

    async def start(self, force_build: bool) -> None:
        self._folder = Path(tempfile.mkdtemp())
        for name in (*OWN, "logs/agent", "logs/verifier", "logs/artifacts"):
            (self._folder / name).mkdir()

    async def stop(self, delete: bool) -> None:
        await self.exec("tmux kill-server")  # the one process that Harbor's agents leave behind
        shutil.rmtree(self._folder)

    def _inside(self, path: str) -> Path:
        return self._folder / str(path).lstrip("/")

    async def upload_file(self, source_path, target_path) -> None:
        self._inside(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, self._inside(target_path))

    async def upload_dir(self, source_dir, target_dir) -> None:
        shutil.copytree(source_dir, self._inside(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path, target_path) -> None:
        shutil.copy(self._inside(source_path), target_path)

    async def download_dir(self, source_dir, target_dir) -> None:
        shutil.copytree(self._inside(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None) -> ExecResult:
        """Run one command. A server that it leaves behind, such as tmux, is there for the next."""
        own = [word for name in OWN for word in ("--bind", str(self._folder / name), f"/{name}")]
        wrap = [
            "bwrap",
            "--ro-bind",
            "/",
            "/",
            "--dev",
            "/dev",
            *own,
            "--chdir",
            cwd or "/app",
            "bash",
            "-c",
            command,
        ]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = await asyncio.create_subprocess_exec(*wrap, env=SHOWN | (env or {}), **pipes)
        async with asyncio.timeout(timeout_sec):
            output, errors = await process.communicate()
        return ExecResult(stdout=output.decode(), stderr=errors.decode(), return_code=process.returncode)


def main(tasks: str, agent: str) -> None:
    """Run the task that `agentloop rollout` put into the environment, and post its reward to its session."""
    folder = Path(tasks) / json.loads(os.environ["AGENTLOOP_TASK"])["task_id"]
    url, key = os.environ["AGENTLOOP_SESSION_URL"], os.environ["AGENTLOOP_SESSION_KEY"]
    with tempfile.TemporaryDirectory() as trials:
        model = ["--model", "openai/default", "--agent-kwarg", f"api_base={os.environ['OPENAI_BASE_URL']}"]
        place = ["--env", f"{Path(__file__).stem}:Bubblewrap", "--trials-dir", trials, "--trial-name", "one"]
        harbor = [str(Path(sys.executable).with_name("harbor")), "trial", "start", "--path", str(folder)]
        paths = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
        subprocess.run([*harbor, "--agent", agent, *model, *place], env=paths, check=True)
        reward = json.loads((Path(trials) / "one" / "result.json").read_text())["verifier_result"]["rewards"][
            "reward"
        ]
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    body = json.dumps({"reward": reward}).encode()
    urllib.request.urlopen(urllib.request.Request(f"{url}/reward", body, headers), timeout=30).close()


if __name__ == "__main__":
    main(*sys.argv[1:])
