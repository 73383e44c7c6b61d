"""A Ray cluster of several nodes on this machine, whose processes a test may kill.

`RayNodes` is what tests hold; this file, run as a program, is the keeper: the process that starts the
nodes. All processes of a cluster carry a mark in their environment, by which the last of them are ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

from ckn_scale.ray_cluster import short_temp_folder

MARK = "CKN_TEST_CLUSTER"
QUICK_FAILOVER = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
}
OBJECT_STORE_BYTES = 80 * 2**20


class RayNodes:
    """`count` nodes with the given resources each; the first is the head."""

    def __init__(self, env: dict[str, str], count: int, *, num_cpus: int = 1, num_gpus: int = 0) -> None:
        self.mark = uuid.uuid4().hex
        self.env = {**env, **QUICK_FAILOVER, MARK: self.mark, "RAY_AUTH_MODE": "disabled"}
        self.env["RAY_worker_niceness"] = "0"
        self.count, self.each = count, {"num_cpus": num_cpus, "num_gpus": num_gpus}
        self.address = ""
        self.nodes: list[dict[str, Any]] = []

    def __enter__(self) -> RayNodes:
        self._temp = tempfile.TemporaryDirectory(
            prefix="ckn-", dir=short_temp_folder(), ignore_cleanup_errors=True
        )
        # Ray's Cluster writes its address into the default folder, which only another Ray would have made.
        self.env["RAY_TMPDIR"] = self._temp.name
        Path(self._temp.name, "ray").mkdir()
        self._said = Path(self._temp.name, "keeper.log")
        with self._said.open("w") as said:
            self._keeper = subprocess.Popen(
                [sys.executable, __file__],
                env=self.env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )
        try:
            for _ in range(self.count):
                self.add_node()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._keeper.kill()
        self._keeper.communicate()
        while left := find_marked(self.mark):
            for pid in left:
                send_signal(pid, signal.SIGKILL)
        self._temp.cleanup()

    @property
    def driver_env(self) -> dict[str, str]:
        """What a driver needs to work on this cluster with `--ray auto`."""
        return {**self.env, "RAY_ADDRESS": self.address}

    def add_node(self) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):  # it has ended: its log says why
            self._keeper.stdin.write(json.dumps(self.each) + "\n")  # type: ignore[union-attr]
            self._keeper.stdin.flush()  # type: ignore[union-attr]
        answer = self._keeper.stdout.readline()  # type: ignore[union-attr]
        if not answer:
            raise RuntimeError(f"no node was started; its keeper said:\n{self._said.read_text()[-4000:]}")
        node = json.loads(answer)
        self.address = node["address"]
        self.nodes.append(node)
        return node

    def kill_node(self, node: dict[str, Any]) -> None:
        """All its processes at once, as a power cut does."""
        for pid in (*self.list_workers(node), *node["pids"]):
            send_signal(pid, signal.SIGKILL)
        self.nodes.remove(node)

    def list_workers(self, node: dict[str, Any]) -> list[int]:
        """The worker processes of a node: its raylet started them."""
        return [child for pid in node["pids"] for child in list_children(pid)]


def send_signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def list_children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def read_bytes(path: str) -> bytes:
    """A file of /proc; empty when its process has ended."""
    with contextlib.suppress(OSError):
        return Path(path).read_bytes()
    return b""


def listen_to_signals() -> None:
    """For `preexec_fn`: as at a terminal, also where tests run in the background, which ignores them."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def find_marked(mark: str) -> list[int]:
    """Processes of a cluster, by what is in their environment; zombies have none."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return [pid for pid in found if pid != os.getpid()]


def keep_cluster() -> None:
    """Starts a node for each line read, and answers with its processes; ends with its input."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    for line in sys.stdin:
        options: dict[str, Any] = {**json.loads(line), "object_store_memory": OBJECT_STORE_BYTES}
        if not cluster.list_all_nodes():
            options |= {"include_dashboard": False}
        node = cluster.add_node(**options)
        pids = [one.process.pid for group in node.all_processes.values() for one in group]
        answer = {"address": cluster.address, "id": node.node_id, "pids": pids}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    keep_cluster()
