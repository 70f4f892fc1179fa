"""Podman as a service with a small image, for tests of containers."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

IMAGE = "localhost/agentloop-test"
PROGRAMS = "sh cat tar head tail sleep ls mkdir rm echo env mv kill ps id touch date find grep seq tr wc true"


def why_not() -> str | None:
    """Return the reason why containers cannot be tested here; None if they can."""
    for program in ("podman", "busybox"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if shutil.which("runc") is None and shutil.which("crun") is None:
        return "neither runc nor crun is installed"
    return None


def rootfs(folder: Path) -> Path:
    """Write a root file system with busybox, which must be static."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)
    shutil.copy(shutil.which("busybox") or "", programs / "busybox")
    for name in PROGRAMS.split():
        (programs / name).symlink_to("busybox")
    return folder


@contextlib.contextmanager
def podman(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Run the service with separate storage; yields its socket, and podman's command line. Does not skip tests."""
    runtime = ["--runtime", "runc"] if shutil.which("runc") else []
    command = ["podman", *runtime, "--cgroup-manager=cgroupfs", f"--root={folder}/root", f"--runroot={folder}/run"]
    root = rootfs(folder / "image")
    with tarfile.open(folder / "image.tar", "w") as archive:
        archive.add(root, arcname=".")
    subprocess.run([*command, "import", str(folder / "image.tar"), IMAGE], check=True, capture_output=True)
    socket = str(folder / "podman.sock")
    service = subprocess.Popen([*command, "system", "service", "--time=0", f"unix://{socket}"])
    try:
        while not Path(socket).exists():
            assert service.poll() is None, "it ended"
            time.sleep(0.02)
        yield socket, command
    finally:
        service.terminate()
        service.wait()
        subprocess.run([*command, "rm", "-fa"], check=False, capture_output=True)
        deadline = time.monotonic() + 20
        while str(folder) in _processes() and time.monotonic() < deadline:
            time.sleep(0.05)  # it cleans up after a container asynchronously, and mounts its storage for that
        unmount = ["umount", "--lazy", f"{folder}/root/overlay"]
        while subprocess.run(unmount, check=False, capture_output=True).returncode == 0:
            pass


def _processes() -> str:
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
