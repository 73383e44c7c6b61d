"""Several hosts on this machine, for tests: each with its own network, processes, name and some folders.

A host is a process in namespaces of its own; what it starts ends with it. Needs root and iproute2.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

NETWORK = "10.78.0"


def why_impossible() -> str | None:
    """Why no hosts can be made here; None when they can."""
    missing = [tool for tool in ("ip", "unshare", "nsenter", "mount") if shutil.which(tool) is None]
    if missing:
        return f"hosts need {', '.join(missing)} (Debian: iproute2, util-linux)"
    if os.geteuid() != 0:
        return "hosts need root, to make namespaces"
    tried = subprocess.run(["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "true"], check=False)
    return None if tried.returncode == 0 else "this kernel gives no namespaces here"


class Hosts:
    """`count` hosts on one switch. `private` folders are empty and apart on each of them."""

    def __init__(self, count: int, folder: Path, private: Sequence[Path]) -> None:
        self.tag = f"ckn{os.getpid()}"
        self.names = [f"{self.tag}h{i + 1}" for i in range(count)]
        self.addresses = [f"{NETWORK}.{i + 11}" for i in range(count)]
        self.folder, self.private = folder, private
        self._inits: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Hosts:
        try:
            self._make_switch()
            for i in range(len(self.names)):
                self._plug_in(i)
                self._boot(i)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for init in self._inits:
            init.kill()  # and with it, all that runs on the host
            init.wait()
        for name in (*self.names, self.tag):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def command(self, host: int, *arguments: str) -> list[str]:
        """What to start here so that `arguments` run there."""
        init = self._children(self._inits[host].pid)[0]
        return ["nsenter", "-t", str(init), "-m", "-p", "-u", "-n", f"--wd={self.folder}", *arguments]

    def _make_switch(self) -> None:
        _ip("netns", "add", self.tag)
        _ip("-n", self.tag, "link", "add", "switch", "type", "bridge")
        _ip("-n", self.tag, "link", "set", "switch", "up")

    def _plug_in(self, host: int) -> None:
        name, port = self.names[host], f"port{host}"
        _ip("netns", "add", name)
        _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", self.tag)
        _ip("-n", name, "addr", "add", f"{self.addresses[host]}/24", "dev", "eth0")
        for link in ("eth0", "lo"):
            _ip("-n", name, "link", "set", link, "up")
        _ip("-n", self.tag, "link", "set", port, "master", "switch", "up")

    def _boot(self, host: int) -> None:
        known = self.folder / "etc-hosts"
        lines = [f"{address} {name}" for address, name in zip(self.addresses, self.names, strict=True)]
        known.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        mounts = [f"mount --bind {known} /etc/hosts", "mount -t tmpfs -o size=1g tmpfs /dev/shm"]
        mounts += [f"mkdir -p {path} && mount -t tmpfs tmpfs {path}" for path in self.private]
        up = self.folder / f"{self.names[host]}-is-up"
        script = " && ".join([f"hostname {self.names[host]}", *mounts, f"touch {up}", "exec sleep infinity"])
        unshare = ["unshare", "--mount", "--pid", "--uts", "--fork", "--mount-proc", "--kill-child"]
        command = ["ip", "netns", "exec", self.names[host], *unshare, "sh", "-c", script]
        self._inits.append(subprocess.Popen(command))
        ends = time.monotonic() + 30
        while not up.exists():
            assert time.monotonic() < ends, f"{self.names[host]} did not come up"
            time.sleep(0.05)

    def _children(self, pid: int) -> list[int]:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
