"""An engine for front-end tests: it speaks the wire protocol and emits a known token sequence, no model.

The token at an output position is a function of prompt length and position only, so a migrated request must continue
exactly where it was. Use it as a thread (`FakeEngine.start`) to look inside, or as a program to kill it; the program
prints its InstanceInfo as JSON.
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from conflux_ray import wire
from conflux_ray.transport import Departed, InstanceEndpoint
from conflux_ray.wire import AddRequest, Feature, FinishReason, InstanceInfo, LoadReport, Logprobs, RequestOutput

VOCABULARY = 49152
FEATURES = (Feature.LOGPROBS, Feature.MIN_TOKENS, Feature.SEED, Feature.PENALTIES)


def token(prompt_length: int, position: int) -> int:
    """The token at an output position: whole words of SmolLM2's vocabulary."""
    return 300 + (prompt_length * 7919 + position * 104729) % 8000


def tokens(prompt_length: int, count: int) -> list[int]:
    """The first `count` tokens of a request."""
    return [token(prompt_length, i) for i in range(count)]


@dataclass
class Running:
    peer: str
    request: AddRequest
    emitted: int


class FakeEngine:
    """Every running request gets one token per iteration, an iteration every `interval` seconds."""

    def __init__(self, instance_id: str = "i0", interval: float = 0.002, max_model_len: int = 2048) -> None:
        self.interval = interval
        self.ready = wire.Ready(
            wire.PROTOCOL_VERSION,
            instance_id,
            secrets.token_hex(4),
            "fake",
            max_model_len,
            VOCABULARY,
            256,
            FEATURES,
        )
        self.endpoint = InstanceEndpoint("127.0.0.1", "secret", self.ready)
        self.info = InstanceInfo(instance_id, self.ready.incarnation, self.endpoint.address, "secret")
        self.running: dict[str, Running] = {}
        self.added: list[AddRequest] = []
        self.aborted: list[tuple[str, int]] = []
        self.draining = self.closing = False
        self.choose: Callable[[AddRequest, int], int] = lambda r, position: token(len(r.prompt_token_ids), position)
        self.tamper: Callable[[RequestOutput], RequestOutput] = lambda output: output
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> FakeEngine:
        self._thread = threading.Thread(target=self.run, daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stop.set()
        self.endpoint.wake()
        if self._thread is not None:
            self._thread.join()

    def run(self) -> None:
        next_iteration = time.monotonic()
        while not self._stop.is_set():
            for peer, message in self.endpoint.poll(max(0.0, next_iteration - time.monotonic())):
                self._take(peer, message)
            if (now := time.monotonic()) >= next_iteration:
                next_iteration = now + self.interval
                self._step()
        self.endpoint.close("stopped by the test")

    def _take(self, peer: str, message: AddRequest | wire.Abort | Departed) -> None:
        if isinstance(message, AddRequest):
            self.added.append(message)
            self.running[message.request_id] = Running(peer, message, len(message.output_token_ids))
        elif isinstance(message, wire.Abort):
            self.aborted += message.requests
            for request_id, attempt in message.requests:
                if request_id in self.running and self.running[request_id].request.attempt == attempt:
                    del self.running[request_id]
        else:
            for request_id in [r for r, running in self.running.items() if running.peer == peer]:
                del self.running[request_id]

    def _step(self) -> None:
        outputs: dict[str, list[RequestOutput]] = {}
        for request_id, running in list(self.running.items()):
            output = self.tamper(self._next_output(running))
            outputs.setdefault(running.peer, []).append(output)
            if output.finish_reason is not None:
                del self.running[request_id]
        report = LoadReport(0.0, 1000.0, len(self.running), 0, 0.0, self.draining, self.closing)
        self.endpoint.publish(outputs, report)

    def _next_output(self, running: Running) -> RequestOutput:
        request, position = running.request, running.emitted
        running.emitted += 1
        new = self.choose(request, position)
        finish, stop = None, None
        if new in request.sampling.stop_token_ids:
            finish, stop = FinishReason.STOP, new
        elif running.emitted >= request.sampling.max_tokens:
            finish = FinishReason.LENGTH
        logprobs = None
        if request.sampling.logprobs is not None:
            width = 1 + request.sampling.logprobs
            alternatives = np.arange(width - 1)  # the first is the sampled token again, as samplers give it
            ids = np.concatenate(([new], (new + alternatives) % VOCABULARY))
            values = np.concatenate(([-0.5], -0.5 - alternatives))
            logprobs = Logprobs.from_arrays(ids[None, :], values[None, :], [1])
        return RequestOutput(request.request_id, request.attempt, position, [new], finish, stop, logprobs)


class FakeEngineProcess:
    """The same in a process of its own, to be killed."""

    def __init__(self, instance_id: str, interval: float = 0.02) -> None:
        command = [sys.executable, __file__, "--instance-id", instance_id, "--interval", str(interval)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.info = InstanceInfo(*json.loads(self.process.stdout.readline()))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--instance-id", default="i0")
    parser.add_argument("--interval", type=float, default=0.005)
    chosen = parser.parse_args()
    engine = FakeEngine(chosen.instance_id, chosen.interval)
    info = engine.info
    print(json.dumps([info.instance_id, info.incarnation, info.address, info.token]), flush=True)
    engine.run()
