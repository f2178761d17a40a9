"""Streams under faults: two instances lose workers, their own lives and their ingress, and no client loses a token.

    python -m tests.e2e.chaos --streams 200 --faults 12 --seed 1

Real processes throughout. A client whose ingress is killed sees its connection break, and may send the request again;
every other stream has to end with exactly the tokens of the reference model, greedy or sampled with its seed.
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

import psutil
import torch

from conflux_ray.models import store
from conflux_ray.models.reference import Reference
from tests.e2e.server import Server, ready, running, wait_for
from tests.e2e.tiny import Stream, leftovers

NUM_INSTANCES = 2
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

FAULTS: dict[str, tuple[str, signal.Signals]] = {
    "a worker is killed": (WORKER, signal.SIGKILL),
    "a worker is frozen": (WORKER, signal.SIGSTOP),
    "an instance is killed": (INSTANCE, signal.SIGKILL),
    "an ingress is killed": (INGRESS, signal.SIGKILL),
    "the registry is killed": (REGISTRY, signal.SIGKILL),
}


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
        self._ingress_deaths = 0
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
        self._left = streams
        clients = [threading.Thread(target=self._client, args=(self._rng.random(),)) for _ in range(at_once)]
        for client in clients:
            client.start()
        names = [name for _ in range(faults) for name in self._rng.sample(sorted(FAULTS), 1)]
        if faults >= len(FAULTS):
            names[: len(FAULTS)] = self._rng.sample(sorted(FAULTS), len(FAULTS))
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
        self._recover()
        self._check()
        self.outcome.seconds = time.monotonic() - started
        return self.outcome

    def _inject(self, name: str) -> None:
        """Wait until both instances serve, then do it in mid-stream."""
        self._recover()
        if self._problems:
            raise ChaosError("\n".join(self._problems))
        time.sleep(self._rng.uniform(0.5, 2.0))
        text, number = FAULTS[name]
        victims = find(self._server, text)
        if not victims:
            raise ChaosError(f"{name}: there is none")
        victim = self._rng.choice(victims)
        self._say(f"{name} (process {victim.pid}); {len(self._finished)} streams done")
        if text == INGRESS:
            self._ingress_deaths += 1
        os.kill(victim.pid, number)
        self.outcome.faults[name] += 1
        if number == signal.SIGSTOP:
            wait_for(lambda: not victim.is_running(), 90, lambda: f"process {victim.pid} is still frozen")

    def _recover(self) -> None:
        wait_for(lambda: ready(self._server.url), 120, lambda: "the server does not come back")
        wait_for(
            lambda: len(find(self._server, WORKER)) == NUM_INSTANCES == len(self._server.all_stats(NUM_INSTANCES)),
            150,
            lambda: "an instance does not come back",
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
                before = self._ingress_deaths
                stream.run()
                if stream.error is None and stream.done:
                    break
                if self._ingress_deaths == before and not self._was_killed(before):
                    with self._lock:
                        self._problems.append(f"{stream.error or 'a silent end'} after {len(stream.tokens)} tokens")
                    return
                with self._lock:
                    self.outcome.broken += 1
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
            for i, token in enumerate(stream.tokens):
                scores = candidates(logits[i], stream.body, len(prompt) + i)
                if int(scores.argmax()) == token:
                    continue
                best = float(scores.max())
                if best - float(scores[token]) > NEAR_TIE * max(1.0, abs(best)):
                    raise ChaosError(
                        f"token {i} of {wanted} is {token}, the reference's {int(scores.argmax())}; prompt {prompt}, "
                        f"{stream.changes}"
                    )
                self.outcome.near_ties += 1


def candidates(logits: torch.Tensor, body: dict, position: int) -> torch.Tensor:
    """Scores whose largest is the token at `position`: the logits, or with a seed log(p / q), q exponential noise."""
    if "seed" not in body:
        return logits
    from conflux_ray.vllm_compat.sampler import position_seed

    generator = torch.Generator().manual_seed(position_seed(body["seed"], position))
    noise = torch.empty_like(logits).exponential_(generator=generator)
    return torch.log_softmax(logits / body["temperature"], -1) - noise.log()


@contextlib.contextmanager
def chaos_server(folder: Path, port: int):
    """deployments/two-instances.yaml with a model that is called "tiny"."""
    with running(folder, port, deployment="two-instances.yaml", model={"served_model_name": "tiny"}) as server:
        yield server


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--faults", type=int, default=12)
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
        server.wait_idle(60, count=NUM_INSTANCES)
    wait_for(lambda: leftovers() <= before, 20, lambda: f"left behind: {leftovers() - before}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
