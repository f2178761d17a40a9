"""The border to vLLM: which version, who may import it, and what of its Python interface this project relies on."""

from __future__ import annotations

import ast
import inspect
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import conflux_ray
from conflux_ray.vllm_compat import plugin, version

PACKAGE = Path(conflux_ray.__path__[0])
LIGHT = sorted(
    [PACKAGE / "wire.py", PACKAGE / "config.py", *(PACKAGE / "planning").glob("*.py"), *(PACKAGE / "kv").glob("*.py")]
)
MESSAGE_SIZES = [0, 1, 1 << 20, (1 << 20) + 1, 3 << 20]  # bytes; a chunk of the shared memory holds 1 MiB


class TestVersionGate:
    def install(self, monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
        def installed(name: str) -> str:
            assert name == "vllm"
            if found is None:
                raise PackageNotFoundError(name)
            return found

        monkeypatch.setattr(version, "version", installed)

    @pytest.mark.parametrize("suffix", ["", "+cu129", "+cpu"])
    def test_the_exact_version_passes_whatever_its_build(self, monkeypatch: pytest.MonkeyPatch, suffix: str):
        self.install(monkeypatch, version.VLLM_VERSION + suffix)
        version.require_version()

    @pytest.mark.parametrize("found", ["0.25.9", "0.26.1", "0.27.0rc1", "0.26.0.post1", "1.0.0+cu129"])
    def test_any_other_is_refused_with_both_versions_and_the_remedy(self, monkeypatch: pytest.MonkeyPatch, found: str):
        self.install(monkeypatch, found)
        with pytest.raises(version.VersionError) as caught:
            version.require_version()
        message = str(caught.value)
        assert message.startswith(f"vllm=={found} is installed")
        assert f"exactly vllm=={version.VLLM_VERSION} (see locks/)" in message

    def test_a_missing_vllm_is_refused_with_the_version_to_install(self, monkeypatch: pytest.MonkeyPatch):
        self.install(monkeypatch, None)
        with pytest.raises(version.VersionError, match=rf"not installed; install vllm=={version.VLLM_VERSION}"):
            version.require_version()

    def test_the_project_requires_the_version_it_checks(self):
        project = PACKAGE.parent / "pyproject.toml"
        assert f'"vllm=={version.VLLM_VERSION}"' in project.read_text()


class TestPlugin:
    @pytest.mark.parametrize("value", [None, "", "0", "1", "cuda", "CPU"])
    def test_it_stays_off_unless_the_variable_says_cpu(self, monkeypatch: pytest.MonkeyPatch, value: str | None):
        monkeypatch.delenv(plugin.PLATFORM_VARIABLE, raising=False)
        if value is not None:
            monkeypatch.setenv(plugin.PLATFORM_VARIABLE, value)
        assert plugin.activate() is None

    def test_the_variable_names_the_cpu_platform(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv(plugin.PLATFORM_VARIABLE, "cpu")
        assert plugin.activate() == "conflux_ray.vllm_compat.platform.ConfluxCpuPlatform"

    def test_a_process_can_ask_for_it(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv(plugin.PLATFORM_VARIABLE, "cuda")
        plugin.use_cpu_platform()
        assert plugin.activate() is not None


def imported_packages(path: Path) -> set[str]:
    """Top-level packages that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


class TestImports:
    def test_vllm_is_imported_in_this_package_only(self):
        importers = {p.relative_to(PACKAGE) for p in PACKAGE.rglob("*.py") if "vllm" in imported_packages(p)}
        assert importers
        assert {path.parts[0] for path in importers} == {"vllm_compat"}

    @pytest.mark.parametrize("path", LIGHT, ids=lambda p: str(p.relative_to(PACKAGE)))
    def test_planning_kv_wire_and_configuration_import_no_heavy_package(self, path: Path):
        assert not imported_packages(path) & {"torch", "ray", "vllm", "transformers"}


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.heavy
class TestInterfacesReliedOn:
    def test_message_queue(self):
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        assert parameters(MessageQueue.__init__)[:5] == [
            "self",
            "n_reader",
            "n_local_reader",
            "local_reader_ranks",
            "max_chunk_bytes",
        ]
        assert "max_chunks" in parameters(MessageQueue.__init__)
        assert parameters(MessageQueue.create_from_handle) == ["handle", "rank"]
        assert parameters(MessageQueue.enqueue) == ["self", "obj", "timeout"]
        assert "timeout" in parameters(MessageQueue.dequeue)

    def test_attributes_of_a_message_queue(self):
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        from conflux_ray.vllm_compat.channel import Reader, Writer

        writer = Writer(1)
        reader = Reader(writer.handle, 0, spin=0.0)
        try:
            for queue in (writer._queue, reader._queue):
                assert isinstance(queue, MessageQueue)
                assert hasattr(queue.local_socket, "close")
                assert hasattr(queue, "shutting_down")
                assert hasattr(queue._spin_condition.local_notify_socket, "close")
                assert hasattr(queue.buffer, "get_metadata")
                assert isinstance(queue.current_idx, int)
            assert writer._queue.buffer.is_creator
            assert not reader._queue.buffer.is_creator
            assert not writer._queue._spin_condition.is_reader
            condition = reader._queue._spin_condition
            assert condition.is_reader
            assert condition.busy_loop_s == 0.0
            assert {"write_cancel_socket", "read_cancel_socket"} <= vars(condition).keys()
            assert isinstance(reader._queue.local_reader_rank, int)
        finally:
            writer._queue.buffer.shared_memory.unlink()
            writer._queue.buffer.is_creator = False
            reader.close()
            writer.close()

    def test_sampler(self):
        from dataclasses import fields

        from vllm.v1.outputs import LogprobsTensors
        from vllm.v1.sample.metadata import SamplingMetadata
        from vllm.v1.sample.sampler import Sampler

        required = {
            "temperature",
            "all_greedy",
            "all_random",
            "top_p",
            "top_k",
            "generators",
            "max_num_logprobs",
            "no_penalties",
            "prompt_token_ids",
            "frequency_penalties",
            "presence_penalties",
            "repetition_penalties",
            "output_token_ids",
            "allowed_token_ids_mask",
            "bad_words_token_ids",
            "logitsprocs",
        }
        assert required <= {field.name for field in fields(SamplingMetadata)}
        assert parameters(Sampler.forward)[:3] == ["self", "logits", "sampling_metadata"]
        assert LogprobsTensors._fields[:3] == ("logprob_token_ids", "logprobs", "selected_token_ranks")

    def test_forward_context(self):
        from vllm.forward_context import set_forward_context

        assert parameters(set_forward_context)[:2] == ["attn_metadata", "vllm_config"]
        assert {"num_tokens", "cudagraph_runtime_mode"} <= set(parameters(set_forward_context))

    def test_process_groups(self):
        from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

        assert parameters(init_distributed_environment)[:5] == [
            "world_size",
            "rank",
            "distributed_init_method",
            "local_rank",
            "backend",
        ]
        assert parameters(ensure_model_parallel_initialized)[:2] == [
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
        ]

    def test_attention_layer(self):
        from vllm.model_executor.layers.attention import Attention
        from vllm.v1.attention.backend import AttentionBackend, AttentionImpl

        from conflux_ray.vllm_compat.backend import XPAttentionBackend, XPAttentionImpl

        known = {
            "num_heads",
            "head_size",
            "scale",
            "num_kv_heads",
            "alibi_slopes",
            "logits_soft_cap",
            "per_layer_sliding_window",
            "attn_type",
            "kv_sharing_target_layer_name",
        }
        assert known <= set(parameters(Attention.__init__))
        assert issubclass(XPAttentionBackend, AttentionBackend)
        assert issubclass(XPAttentionImpl, AttentionImpl)
        assert parameters(XPAttentionImpl.forward)[1:8] == parameters(AttentionImpl.forward)[1:8]
        assert AttentionBackend.forward_includes_kv_cache_update is True


def named_segment(end) -> Path:
    """Where the shared memory of a writer or a reader is, while it has a name."""
    name = end._queue.buffer.shared_memory.name
    assert name.startswith("psm_")
    return Path("/dev/shm") / name


class Channel:
    """A writer and its readers, connected; each reader lives in a thread of its own while it connects."""

    def __init__(self, num_readers: int) -> None:
        from conflux_ray.vllm_compat.channel import Reader, Writer

        self.writer = Writer(num_readers)
        self.readers = [Reader(self.writer.handle, index, spin=0.0) for index in range(num_readers)]
        self._threads = [threading.Thread(target=reader.wait_until_ready, daemon=True) for reader in self.readers]
        for thread in self._threads:
            thread.start()
        self.writer.wait_until_ready()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()

    def close(self) -> None:
        for end in (*self.readers, self.writer):
            end.close()


@pytest.fixture
def channel() -> Iterator[Channel]:
    channel = Channel(num_readers=2)
    yield channel
    channel.close()


@pytest.mark.heavy
@pytest.mark.timeout(120)
class TestChannel:
    @pytest.mark.parametrize("size", MESSAGE_SIZES)
    def test_every_reader_receives_what_is_sent_also_beyond_a_chunk(self, channel: Channel, size: int):
        data = bytes(i % 251 for i in range(1009)) * (size // 1009 + 1)
        received: list[bytes] = []
        threads = [
            threading.Thread(target=lambda r=reader: received.append(r.receive(60)), daemon=True)
            for reader in channel.readers
        ]
        for thread in threads:
            thread.start()
        channel.writer.send(data[:size], timeout=60)
        for thread in threads:
            thread.join(60)
        assert [m == data[:size] for m in received] == [True, True]

    def test_messages_arrive_in_order(self, channel: Channel):
        received: list[bytes] = []
        other = threading.Thread(target=lambda: [channel.readers[1].receive(60) for _ in range(40)], daemon=True)
        own = threading.Thread(
            target=lambda: received.extend(channel.readers[0].receive(60) for _ in range(40)), daemon=True
        )
        own.start()
        other.start()
        for i in range(40):
            channel.writer.send(b"%d" % i, timeout=60)
        own.join(60)
        other.join(60)
        assert received == [b"%d" % i for i in range(40)]

    def test_ready_says_whether_a_message_waits(self, channel: Channel):
        reader = channel.readers[0]
        assert not reader.ready()
        channel.writer.send(b"plan", timeout=60)
        assert reader.ready()
        assert reader.receive(60) == b"plan"
        assert not reader.ready()

    def test_a_reader_gives_up_after_its_timeout(self, channel: Channel):
        with pytest.raises(TimeoutError):
            channel.readers[0].receive(timeout=0.05)

    def test_a_writer_gives_up_when_the_readers_leave_no_room(self, channel: Channel):
        def fill() -> None:
            for _ in range(100):
                channel.writer.send(b"plan", timeout=0.05)

        with pytest.raises(TimeoutError):
            fill()

    def test_a_connected_channel_has_no_named_shared_memory(self):
        channel = Channel(num_readers=2)
        exists = named_segment(channel.writer).exists()
        channel.close()
        assert not exists

    def test_it_closes_without_hanging_while_messages_are_unread(self):
        channel = Channel(num_readers=2)
        segment = named_segment(channel.writer)
        channel.writer.send(b"plan", timeout=60)
        channel.writer.send(bytes(2 << 20), timeout=60)
        closing = threading.Thread(target=channel.close, daemon=True)
        closing.start()
        closing.join(30)
        assert not closing.is_alive()
        assert not segment.exists()

    def test_a_process_of_its_own_reads_and_answers(self):
        code = (
            "import pickle, sys; from conflux_ray.vllm_compat.channel import Reader, Writer\n"
            "source, sink = sys.stdin.buffer, sys.stdout.buffer\n"
            "reader, writer = Reader(pickle.load(source), 0, 0.0), Writer(1)\n"
            "pickle.dump(writer.handle, sink); sink.flush()\n"
            "reader.wait_until_ready(); writer.wait_until_ready()\n"
            "writer.send(reader.receive(60)[::-1], 60)\n"
            "source.read()  # until the parent has the answer\n"
            "reader.close(); writer.close()\n"
        )
        from conflux_ray.vllm_compat.channel import Reader, Writer

        plans = Writer(1)
        assert named_segment(plans).exists()
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
            pickle.dump(plans.handle, worker.stdin)
            worker.stdin.flush()
            results = Reader(pickle.load(worker.stdout), 0, 0.0)
            plans.wait_until_ready()
            results.wait_until_ready()
            message = bytes(range(256)) * 5000  # 1.28 MB, beyond a chunk
            plans.send(message, 60)
            answer = results.receive(60)
            segments = [named_segment(plans), named_segment(results)]
            worker.stdin.close()
            results.close()
            plans.close()
        assert answer == message[::-1]
        assert worker.returncode == 0
        assert [segment.exists() for segment in segments] == [False, False]
