"""Starting the servers of a benchmark, and ending every process of theirs.

An end is SIGTERM to what was started, a bounded wait, then SIGKILL to whatever is left of it: its descendants and its
session, so that Ray's and vLLM's processes go along even if the one that began them has died before.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import yaml

from conflux_ray.bench.live.contenders import Launch
from conflux_ray.bench.live.server_info import ServerError, healthy, kv_tokens_in, ready_instances

STOP_SECONDS = 30.0
"""After SIGTERM, before SIGKILL."""
LEFT_SECONDS = 5.0
"""That what a server leaves has to end by itself, before SIGKILL."""
FREE_SECONDS = 30.0
"""Longest wait for the GPUs' memory once all processes are gone."""
_FREE_MIB = 2048
_POLL = 0.5
_LOG_LINES = 40
_OURS = ("CONFLUX_VLLM", "RAY_", "VLLM_LOGGING")
"""Variables of this process that say nothing of a server that it starts."""


def _ready(launch: Launch) -> bool:
    """Whether a server answers, and all instances of a Conflux deployment with several take requests."""
    if not healthy(launch.url):
        return False
    if launch.deployment is None:
        return True
    wanted = launch.deployment["applications"][0]["args"]["instance"].get("num_replicas", 1)
    return wanted == 1 or ready_instances(launch.url) >= wanted


class Servers:
    """The running processes of one contender.

    Args:
        launches: how to start each.
        folder: for logs and deployment files.
        name: of the contender.
        device: "cuda" or "cpu".
    """

    def __init__(self, launches: Sequence[Launch], folder: Path, name: str, device: str) -> None:
        self._launches = launches
        self._folder = folder
        self._name = name
        self._device = device
        self._processes: list[subprocess.Popen[bytes]] = []
        self._members: dict[int, psutil.Process] = {}
        self._scratch: list[str] = []
        self.logs = [folder / f"{name}-{number}.log" for number in range(len(launches))]

    @property
    def urls(self) -> tuple[str, ...]:
        """Where the replicas answer."""
        return tuple(launch.url for launch in self._launches)

    @property
    def process(self) -> psutil.Process:
        """The first of them, while it runs."""
        return psutil.Process(self._processes[0].pid)

    def start(self, seconds: float, progress: Callable[[float], None] = lambda waited: None) -> float:
        """Start all and wait until they answer.

        Args:
            seconds: longest wait.
            progress: called now and then with the seconds so far.

        Returns:
            Seconds that it took.

        Raises:
            ServerError: one ended or was too slow; the message has the end of its log.
        """
        began = time.monotonic()
        self._folder.mkdir(parents=True, exist_ok=True)
        for launch in self._launches:
            if healthy(launch.url):
                raise ServerError(f"{launch.url} answers already: another server has its port; choose another --port")
        for launch, log in zip(self._launches, self.logs, strict=True):
            self._processes.append(self._spawn(launch, log))
        while not all(_ready(launch) for launch in self._launches):
            waited = time.monotonic() - began
            for process, log in zip(self._processes, self.logs, strict=True):
                if process.poll() is not None:
                    raise ServerError(f"{self._name} ended with status {process.returncode}:\n{tail(log)}")
            if waited > seconds:
                raise ServerError(f"{self._name} is not ready after {seconds:.0f} s:\n{tail(self.logs[0])}")
            progress(waited)
            time.sleep(_POLL)
        self._look()
        return time.monotonic() - began

    def kv_tokens(self) -> int | None:
        """Tokens of KV of one logical rank of Conflux, or of one vLLM server, by its logs; None if they do not say."""
        sessions = [path for folder in self._scratch for path in Path(folder).glob("**/logs/worker-*")]
        for log in (*self.logs, *sessions):
            found = kv_tokens_in(log.read_text(errors="replace"))
            if found is not None:
                return found
        return None

    def alive(self) -> bool:
        """Whether all that were started still run."""
        return all(process.poll() is None for process in self._processes)

    def stop(self) -> None:
        """End every process, and wait for the GPUs' memory to be free again."""
        self._look()
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        self._look()
        _, left = psutil.wait_procs(list(self._members.values()), timeout=LEFT_SECONDS)
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for member in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(left, timeout=10)
        self._processes.clear()
        self._members.clear()
        for folder in self._scratch:
            shutil.rmtree(folder, ignore_errors=True)
        self._scratch.clear()
        if self._device == "cuda":
            wait_for_memory(FREE_SECONDS)

    def _spawn(self, launch: Launch, log: Path) -> subprocess.Popen[bytes]:
        variables = {k: v for k, v in os.environ.items() if not k.startswith(_OURS)}
        variables |= launch.environment
        if launch.deployment is not None:
            Path(launch.command[-1]).write_text(yaml.safe_dump(dict(launch.deployment)))
            # Short, since Ray's sockets lie in it.
            scratch = tempfile.mkdtemp(prefix="conflux-")
            self._scratch.append(scratch)
            variables["RAY_TMPDIR"] = scratch
        with log.open("ab") as out:
            out.write(f"{' '.join(launch.command)}\n".encode())
            out.flush()
            return subprocess.Popen(
                launch.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,
            )

    def _look(self) -> None:
        """Remember all processes that belong to the servers: a parent that dies takes the knowledge with it."""
        sessions = {process.pid for process in self._processes}
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    self._members.setdefault(child.pid, child)
        for other in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):
                if other.pid not in sessions and os.getsid(other.pid) in sessions:
                    self._members.setdefault(other.pid, other)


@contextlib.contextmanager
def running(servers: Servers) -> Iterator[Servers]:
    """Stops the servers at the end, however it comes."""
    try:
        yield servers
    finally:
        servers.stop()


def wait_for_memory(seconds: float) -> bool:
    """Wait until every GPU has less than 2 GiB in use; whether that came true. True where there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return True
    deadline = time.monotonic() + seconds
    while True:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=False,
        )
        used = [int(word) for word in done.stdout.split() if word.isdigit()]
        if done.returncode != 0 or max(used, default=0) < _FREE_MIB:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)


def tail(log: Path, lines: int = _LOG_LINES) -> str:
    """The end of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
