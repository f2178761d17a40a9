"""Streams under faults: instances die, hang, come, go and drain, their ingress dies, and no client loses a token.

    python -m tests.e2e.chaos --streams 200 --faults 16 --seed 1

Real processes throughout. A client whose ingress is killed sees its connection break, and one that comes while the
server drains is refused with 503; both may send the request again. Every other stream has to end with exactly the
tokens of the reference model, greedy or sampled with its seed. An instance that is told to go waits for its streams for
`DRAIN_SECONDS` only, so that some end there and some have to move. Now and then a fault comes before the server has
recovered from the one before.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import torch

from conflux_ray.execution.noise import exponential_noise, position_keys
from conflux_ray.metrics.definitions import INGRESS_IN_FLIGHT, INGRESS_WAITING, ROUTER_REQUESTS
from conflux_ray.models import store
from conflux_ray.models.reference import Reference
from tests.e2e.server import Server, ready, running, wait_for
from tests.e2e.tiny import Stream, leftovers

NUM_INSTANCES = 2
MOST_INSTANCES = 3
DRAIN_SECONDS = 3
TEMPERATURE = 0.8
NEAR_TIE = 1e-3
"""Where the reference's best two candidates are closer than this, rounding may choose."""


class ChaosError(AssertionError):
    """A stream went wrong, or the server did not recover."""


@dataclass
class Outcome:
    """What happened."""

    streams: int = 0
    tokens: int = 0
    broken: int = 0  # connections that broke because their ingress was killed
    refused: int = 0  # requests that came while the server drained
    near_ties: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


def find(server: Server, text: str) -> list[psutil.Process]:
    """Processes of the server whose command line contains `text`."""
    found = []
    for process in server.descendants():
        with contextlib.suppress(psutil.NoSuchProcess):
            if text in " ".join(process.cmdline()) and process.status() != psutil.STATUS_STOPPED:
                found.append(process)
    return found


WORKER, INSTANCE, INGRESS = "WorkerActor", "ServeReplica:conflux:instance", "ServeReplica:conflux:ingress"
REGISTRY = "ray::Registry"

KILLS: dict[str, tuple[str, signal.Signals]] = {
    "a worker is killed": (WORKER, signal.SIGKILL),
    "a worker is frozen": (WORKER, signal.SIGSTOP),
    "an instance is killed": (INSTANCE, signal.SIGKILL),
    "an ingress is killed": (INGRESS, signal.SIGKILL),
    "the registry is killed": (REGISTRY, signal.SIGKILL),
}
UP, DOWN, DRAIN = "an instance comes", "an instance goes", "the server drains"
FAULTS = (*KILLS, UP, DOWN, DRAIN)


def order(rng: random.Random, count: int) -> list[str]:
    """`count` faults in random order, each kind at least once if there are enough of them.

    There are always 1 to `MOST_INSTANCES` instances: where one more or one fewer would leave that range, the other of
    the two takes its place.
    """
    names = rng.sample(FAULTS, min(count, len(FAULTS)))
    names += rng.choices(FAULTS, k=count - len(names))
    instances = NUM_INSTANCES
    for i, name in enumerate(names):
        if name in (UP, DOWN):
            if not 1 <= instances + (1 if name == UP else -1) <= MOST_INSTANCES:
                names[i] = DOWN if name == UP else UP
            instances += 1 if names[i] == UP else -1
    return names


def census(server: Server) -> Counter[str]:
    """How many processes of each kind there are; Ray's spare workers, which come and go, are left out."""
    kinds: Counter[str] = Counter()
    for process in server.descendants():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            kind = (process.cmdline() or [process.name()])[0].split("(")[0].strip()
            if not kind.startswith("ray::IDLE"):
                kinds[kind] += 1
    return kinds


def in_flight(server: Server) -> dict[str, float]:
    """The ingress's gauges of requests that have not ended.

    Raises:
        ChaosError: it has none.
    """
    names = tuple(f"{m.name}{{" for m in (INGRESS_IN_FLIGHT, INGRESS_WAITING, ROUTER_REQUESTS))
    lines = httpx.get(f"{server.url}/metrics", timeout=10).text.splitlines()
    gauges = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith(names)}
    if len(gauges) < len(names):
        raise ChaosError(f"/metrics has only {sorted(gauges)} of {names}")
    return gauges


class Chaos:
    """One run.

    Args:
        server: of deployments/two-instances.yaml.
        seed: of requests and faults.
        say: takes a line about what happens.
    """

    def __init__(self, server: Server, seed: int, say: Callable[[str], None]) -> None:
        self._server = server
        self._rng = random.Random(seed)
        self._say = say
        self._instances = NUM_INSTANCES
        self._ingress_deaths = 0
        self._turns = 0  # drains that have begun or ended: odd while one is under way
        self._settled = True  # the next fault waits until all is well
        self._lock = threading.Lock()
        self._left = 0
        self._faults_are_over = False
        self._finished: list[Stream] = []
        self._problems: list[str] = []
        self.outcome = Outcome()

    def run(self, streams: int, faults: int, at_once: int) -> Outcome:
        """Run `streams` streams or more, `at_once` at a time, until all faults are over.

        Raises:
            ChaosError: a stream lost or repeated a token, ended in silence, or the server did not come back.
        """
        started = time.monotonic()
        self._recover()
        baseline = census(self._server)
        self._left = streams
        clients = [threading.Thread(target=self._client, args=(self._rng.random(),)) for _ in range(at_once)]
        for client in clients:
            client.start()
        names = order(self._rng, faults)
        try:
            for name in names:
                self._inject(name)
        finally:
            self._faults_are_over = True
        for client in clients:
            client.join(300)
        if any(client.is_alive() for client in clients):
            raise ChaosError("a client still waits")
        if self._problems:
            raise ChaosError("\n".join(self._problems))
        if self._instances != NUM_INSTANCES:
            self._scale(NUM_INSTANCES - self._instances)
        self._recover()
        self._server.wait_idle(60, count=NUM_INSTANCES)
        wait_for(lambda: not any(in_flight(self._server).values()), 30, lambda: f"gauges: {in_flight(self._server)}")
        wait_for(
            lambda: census(self._server) == baseline,
            60,
            lambda: f"processes: {census(self._server) - baseline} more, {baseline - census(self._server)} fewer",
        )
        self._check()
        self.outcome.seconds = time.monotonic() - started
        return self.outcome

    def _inject(self, name: str) -> None:
        """Do it in mid-stream, mostly when the server has recovered from the fault before."""
        if self._settled:
            self._recover()
        self._settled = self._rng.random() < 0.7
        if self._problems:
            raise ChaosError("\n".join(self._problems))
        time.sleep(self._rng.uniform(0.5, 2.0))
        self._say(f"{name}; {len(self._finished)} streams done, {self._instances} instances")
        if name in (UP, DOWN):
            self._scale(1 if name == UP else -1)
        elif name == DRAIN:
            self._drain()
        else:
            self._kill(*KILLS[name])
        self.outcome.faults[name] += 1

    def _kill(self, text: str, number: signal.Signals) -> None:
        wait_for(lambda: bool(find(self._server, text)), 60, lambda: f"there is no process {text}")
        victim = self._rng.choice(find(self._server, text))
        if text == INGRESS:
            self._ingress_deaths += 1
        os.kill(victim.pid, number)
        if number == signal.SIGSTOP:
            wait_for(lambda: not victim.is_running(), 90, lambda: f"process {victim.pid} is still frozen")

    def _scale(self, change: int) -> None:
        self._instances += change
        self._server.scale(self._instances)

    def _drain(self) -> None:
        """No new requests for a while; those that run go on."""
        self._turns += 1
        self._server.drain(True)
        wait_for(lambda: not ready(self._server.url), 30, lambda: "it still takes requests")
        time.sleep(self._rng.uniform(0.0, 3.0))
        self._server.drain(False)
        wait_for(lambda: ready(self._server.url), 30, lambda: "it takes no requests again")
        self._turns += 1

    def _recover(self) -> None:
        wait_for(lambda: ready(self._server.url), 120, lambda: "the server does not come back")
        count = self._instances
        wait_for(
            lambda: len(find(self._server, WORKER)) == count == len(self._server.all_stats(count)),
            150,
            lambda: f"not {count} instances with a worker each: {len(find(self._server, WORKER))} workers",
        )

    def _client(self, seed: float) -> None:
        rng = random.Random(seed)
        while True:
            with self._lock:
                if self._problems or (self._left <= 0 and self._faults_are_over):
                    return
                self._left -= 1
            prompt = [rng.randrange(3, 500) for _ in range(rng.randint(2, 60))]
            stream = self._stream(rng, prompt, rng.randint(50, 300))
            while True:
                deaths, turns = self._ingress_deaths, self._turns
                stream.run()
                if stream.error is None and stream.done:
                    break
                drained = turns % 2 == 1 or turns != self._turns
                refused = drained and stream.status == 503 and not stream.tokens
                if not refused and self._ingress_deaths == deaths and not self._was_killed(deaths):
                    with self._lock:
                        self._problems.append(
                            f"{stream.error or 'a silent end'} after {len(stream.tokens)} tokens, status "
                            f"{stream.status}"
                        )
                    return
                with self._lock:
                    self.outcome.refused += refused
                    self.outcome.broken += not refused
                while not ready(self._server.url):
                    time.sleep(0.2)
                stream = Stream(self._server, prompt, stream.body["max_tokens"], **stream.changes)
            with self._lock:
                self._finished.append(stream)

    def _was_killed(self, before: int) -> bool:
        """Whether an ingress was killed, which a client can notice before the count is up."""
        time.sleep(0.5)
        return self._ingress_deaths > before

    def _stream(self, rng: random.Random, prompt: list[int], max_tokens: int) -> Stream:
        if rng.random() < 0.5:
            return Stream(self._server, prompt, max_tokens)
        return Stream(self._server, prompt, max_tokens, temperature=TEMPERATURE, seed=rng.randrange(1 << 31))

    def _check(self) -> None:
        reference = Reference(store.model_dir("tiny-llama"))
        for stream in self._finished:
            self.outcome.streams += 1
            self.outcome.tokens += len(stream.tokens)
            prompt, wanted = stream.body["prompt"], stream.body["max_tokens"]
            if len(stream.tokens) != wanted or stream.finish_reason != "length":
                raise ChaosError(f"{len(stream.tokens)} tokens of {wanted}, finish reason {stream.finish_reason}")
            logits = reference.logits([*prompt, *stream.tokens[:-1]])[len(prompt) - 1 :]
            scores = candidates(logits, stream.body, len(prompt))
            best, given = scores.max(-1), torch.tensor(stream.tokens)
            for i in (best.indices != given).nonzero().flatten().tolist():
                highest = float(best.values[i])
                if highest - float(scores[i, given[i]]) > NEAR_TIE * max(1.0, abs(highest)):
                    raise ChaosError(
                        f"token {i} of {wanted} is {given[i]}, the reference's {best.indices[i]}; prompt {prompt}, "
                        f"{stream.changes}"
                    )
                self.outcome.near_ties += 1


def candidates(logits: torch.Tensor, body: dict, position: int) -> torch.Tensor:
    """Scores whose largest is the token: the logits, or with a seed log(p / q), q exponential noise.

    Args:
        logits: of consecutive tokens, a row each.
        body: of the request.
        position: of the first of them.
    """
    if "seed" not in body:
        return logits
    positions = range(position, position + len(logits))
    keys = torch.from_numpy(position_keys([body["seed"]] * len(logits), positions))
    noise = exponential_noise(keys, logits.shape[1])
    return torch.log_softmax(logits / body["temperature"], -1) - noise.log()


@contextlib.contextmanager
def chaos_server(folder: Path, port: int):
    """deployments/two-instances.yaml with a model that is called "tiny", and a number of instances that can be set."""
    with running(
        folder,
        port,
        deployment="two-instances.yaml",
        application={"external_scaler_enabled": True},
        model={"served_model_name": "tiny"},
        instance={"drain_timeout_s": DRAIN_SECONDS},
    ) as server:
        yield server


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--faults", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    before = leftovers()
    with tempfile.TemporaryDirectory() as folder, chaos_server(Path(folder), 18500) as server:
        chaos = Chaos(server, args.seed, lambda line: print(line, flush=True))
        try:
            print(chaos.run(args.streams, args.faults, args.at_once))
        except AssertionError as error:
            print(f"seed {args.seed}: {error}")
            return 1
    wait_for(lambda: leftovers() <= before, 20, lambda: f"left behind: {leftovers() - before}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
