"""Contenders, their processes, and a whole comparison of two servers that are scripts."""

from __future__ import annotations

import io
import json
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

import psutil
import pytest
import yaml

from conflux_ray.bench import compare
from conflux_ray.bench.live import server_info
from conflux_ray.bench.live import servers as servers_module
from conflux_ray.bench.live.contenders import (
    Contender,
    ContenderError,
    Launch,
    Simulated,
    Site,
    deployment_of,
    launches,
    read,
    simulated,
    standard,
)
from conflux_ray.bench.live.point import Load, Point
from conflux_ray.bench.live.predict import FIGURES, FORMAT, errors, hardware_of, predict
from conflux_ray.bench.live.report import (
    Entry,
    attainment_table,
    largest_rate,
    latency_table,
    pairs,
    pairs_table,
    predicted_lengths_table,
)
from conflux_ray.bench.live.server_info import ServerError, healthy, kv_tokens_in
from conflux_ray.bench.live.servers import Servers, running
from conflux_ray.simulator.request import Slo
from conflux_ray.simulator.workload import Workload
from tests.bench.test_live_run import made, trace_file

REPOSITORY = Path(__file__).resolve().parents[2]
GPUS = Site("/models/qwen3-14b-shape", "qwen3-14b-shape", 2, "cuda", 32768, "dummy")
CPU = Site("/models/tiny-llama", "tiny-llama", 2, "cpu", 512, dtype="float32")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def script(port: int) -> Launch:
    """The scripted server as a process."""
    command = (sys.executable, "-m", "tests.bench.scripted", str(port))
    return Launch(command, {"PYTHONPATH": str(REPOSITORY)}, f"http://127.0.0.1:{port}")


# Contenders


def test_the_standard_contenders_have_every_vllm_at_every_budget() -> None:
    names = [c.name for c in standard(2, "cuda", [2048, 4096], 8192)]
    assert names[:3] == ["conflux-slo", "conflux-fcfs", "conflux-2x-slo"]
    assert {"vllm-tp2-2048", "vllm-tp2-priority-4096", "vllm-2x-2048", "vllm-2x-priority-4096"} <= set(names)
    assert len(names) == len(set(names)) == 11
    assert [c.name for c in standard(2, "cpu", [2048], 8192)] == ["conflux-slo", "conflux-fcfs"]


def test_with_the_prefix_cache_every_vllm_is_there_with_and_without(tmp_path: Path) -> None:
    found = standard(1, "cuda", [2048], 8192, prefix_cache=True)
    assert [c.name for c in found] == [
        *("conflux-slo", "conflux-fcfs", "vllm-tp1-2048", "vllm-tp1-priority-2048"),
        *("vllm-tp1-2048-cached", "vllm-tp1-priority-2048-cached"),
    ]
    for contender in found[2:]:
        (launch,) = launches(contender, replace(GPUS, gpus=1), tmp_path)
        cached = contender.name.endswith("-cached")
        assert ("--enable-prefix-caching" in launch.command) == cached
        assert ("--no-enable-prefix-caching" in launch.command) != cached
        assert contender.to_json().get("prefix_cache", False) == cached
    with pytest.raises(ContenderError, match="c: Conflux has no prefix cache"):
        Contender("c", "conflux", "slo", prefix_cache=True)


def test_a_cache_is_simulated_for_who_has_one(tmp_path: Path) -> None:
    # Each prompt is the same 24 blocks of 512 tokens, every 0.2 s: twice what one GPU can compute.
    rows = [
        {"timestamp": 200 * i, "input_length": 12_288, "output_length": 2, "hash_ids": list(range(24))}
        for i in range(200)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    load = Load(Workload.from_file(path, 32768), Slo(), seconds=20.0)
    hardware = hardware_of("qwen3-14b-shape", [{"name": "NVIDIA H200"}])
    assert hardware is not None
    attained = {
        cache: predict(Contender("v", "vllm", "fcfs", prefix_cache=cache), hardware, 1, load, 5.0, 0)["attainment"]
        for cache in (False, True)
    }
    assert attained[False] < 0.5 < attained[True] == 1.0


def test_vllms_command_says_what_all_have_in_common_and_what_it_alone_has(tmp_path: Path) -> None:
    contender = Contender("v", "vllm", "priority", 2, 1, 4096, flags=("--max-num-seqs", "256"))
    (launch,) = launches(contender, GPUS, tmp_path)
    words = " ".join(launch.command[1:])
    assert words.startswith("-m vllm.entrypoints.cli.main serve /models/qwen3-14b-shape ")
    for flag in (
        "--served-model-name qwen3-14b-shape",
        "--load-format dummy",
        "--max-model-len 32768",
        "--gpu-memory-utilization 0.9",
        "--tensor-parallel-size 2",
        "--max-num-batched-tokens 4096",
        "--scheduling-policy priority",
        "--no-enable-prefix-caching",
        "--max-num-seqs 256",
    ):
        assert flag in words
    assert launch.environment["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert launch.environment["HF_HUB_OFFLINE"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in launch.environment


def test_replicas_have_ports_and_gpus_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contender = Contender("v", "vllm", "fcfs", 1, 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    first, second = launches(contender, GPUS, tmp_path)
    assert (first.url, second.url) == ("http://127.0.0.1:18400", "http://127.0.0.1:18401")
    assert [x.environment["CUDA_VISIBLE_DEVICES"] for x in (first, second)] == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    assert [x.environment["CUDA_VISIBLE_DEVICES"] for x in launches(contender, GPUS, tmp_path)] == ["6", "7"]


@pytest.mark.heavy
def test_vllm_knows_every_flag(tmp_path: Path) -> None:
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    for contender in standard(2, "cuda", [2048], 8192, prefix_cache=True):
        if contender.kind == "vllm":
            for launch in launches(contender, GPUS, tmp_path):
                words = list(launch.command)
                args = parser.parse_args(words[words.index("serve") + 1 :])
                validate_parsed_serve_args(args)
                assert args.scheduling_policy == contender.policy
                assert args.max_num_batched_tokens == 2048
                assert args.enable_prefix_caching is contender.prefix_cache


def test_a_conflux_contender_is_a_deployment_of_the_schema() -> None:
    contender = Contender("c", "conflux", "fcfs", budget=8192, args={"scheduler": {"quantum": 32}})
    deployment = deployment_of(contender, GPUS)
    args = deployment["applications"][0]["args"]
    assert args["scheduler"] == {"policy": "fcfs", "max_prefill_tokens": 8192, "quantum": 32}
    assert args["instance"] == {
        "sp_degree": 2,
        "tensor_parallel": 1,
        "device": "cuda",
        "gpu_memory_utilization": 0.9,
        "max_num_seqs": 256,
    }
    assert args["slo"] == {"ttft_s": 2.0, "tbt_s": 0.1}
    assert deployment_of(contender, CPU)["applications"][0]["args"]["instance"]["kv_memory_gib"] == 0.25
    with pytest.raises(ContenderError, match=r"c: scheduler\.wrong=1"):
        deployment_of(replace(contender, args={"scheduler": {"wrong": 1}}), GPUS)


def test_replicas_of_conflux_are_instances_that_share_the_gpus(tmp_path: Path) -> None:
    contender = Contender("c", "conflux", "slo", replicas=2)
    instance = deployment_of(contender, replace(GPUS, gpus=4), tmp_path)["applications"][0]["args"]["instance"]
    assert (instance["sp_degree"], instance["num_replicas"]) == (2, 2)
    assert "iteration_log" not in instance  # they would write into the same file
    assert (
        "iteration_log"
        in deployment_of(replace(contender, replicas=1), GPUS, tmp_path)["applications"][0]["args"]["instance"]
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "sglang"}, "kind='sglang'"),
        ({"policy": "slo"}, "policy='slo' must be one of fcfs, priority"),
        ({"budget": 0}, "must be at least 1"),
        ({"name": "../v"}, "it names a folder"),
        ({"args": {"scheduler": {}}}, "args are Conflux's"),
        ({"kind": "conflux", "flags": ("--x",)}, "flags are vLLM's"),
        ({"rates": (0.0,)}, "must be positive"),
    ],
)
def test_impossible_contenders_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ContenderError, match=message):
        Contender(**{"name": "v", "kind": "vllm", "policy": "fcfs", **fields})


def test_a_contender_must_fit_the_machine(tmp_path: Path) -> None:
    with pytest.raises(ContenderError, match="does not fit 2 GPUs"):
        launches(Contender("v", "vllm", "fcfs", 2, 2), GPUS, tmp_path)
    with pytest.raises(ContenderError, match="does not fit 4 GPUs"):
        launches(Contender("c", "conflux", "fcfs", replicas=3), replace(GPUS, gpus=4), tmp_path)
    with pytest.raises(ContenderError, match="runs on GPUs only"):
        launches(Contender("v", "vllm", "fcfs"), CPU, tmp_path)


def test_contenders_come_from_yaml(tmp_path: Path) -> None:
    path = tmp_path / "contenders.yaml"
    rows = [
        {"name": "a", "kind": "vllm", "policy": "fcfs", "flags": ["--x"], "rates": [1.0]},
        {"name": "b", "kind": "conflux", "policy": "slo", "args": {"scheduler": {"quantum": 8}}},
    ]
    path.write_text(yaml.safe_dump(rows))
    assert read(path)[0] == Contender("a", "vllm", "fcfs", flags=("--x",), rates=(1.0,))
    for wrong, message in (
        ([{**rows[0], "colour": 1}], "a: unknown colour"),
        ([rows[0], rows[0]], "names must differ"),
        ([{"name": "a"}], "needs name, kind and policy"),
        ({}, "must be a list"),
    ):
        path.write_text(yaml.safe_dump(wrong))
        with pytest.raises(ContenderError, match=message):
            read(path)


def test_the_simulator_has_a_system_for_each() -> None:
    found = {c.name: simulated(c, 2) for c in standard(2, "cuda", [2048], 8192)}
    assert found["conflux-slo"] == Simulated("conflux", {"base_tp": 1}, 2)
    assert found["conflux-2x-slo"] == Simulated("conflux", {"base_tp": 1}, 1, 2)
    assert found["vllm-tp2-priority-2048"] == Simulated("chunked-priority", {"tp": 2, "budget": 2048}, 2)
    assert found["vllm-2x-2048"] == Simulated("data-parallel", {"tp": 1, "budget": 2048}, 2)
    assert simulated(Contender("p", "conflux", "plain"), 2) is None
    early = Contender("e", "conflux", "slo", args={"instance": {"late_planning": False}})
    assert simulated(early, 2) == Simulated("conflux", {"base_tp": 1, "lead": inf}, 2)
    hardware = hardware_of("qwen3-14b-shape", 2 * [{"name": "NVIDIA H200"}])
    assert hardware is not None
    assert not hardware.latency(2, 1).name.startswith("stated:")  # the shipped profile
    assert hardware.latency(1, 2).name.startswith("stated:")
    assert hardware_of("tiny-llama", [{"name": "NVIDIA H200"}]) is None
    assert hardware_of("qwen3-14b-shape", []) is None
    load = Load(Workload.from_table("toolagent", 32768), Slo(), seconds=10.0)
    (contender,) = (c for c in standard(2, "cuda", [2048], 8192) if c.name == "vllm-tp2-2048")
    found = predict(contender, hardware, 2, load, 1.0, 0)
    assert found["attainment"] == 1.0
    assert sum(group["counted"] for group in found["lengths"]) == found["counted"]
    assert "error" not in predict(contender, hardware, 2, load, 1.0, 0, kv_tokens=100_000)
    # No request fits any more.
    assert predict(contender, hardware, 2, load, 1.0, 0, kv_tokens=64)["attainment"] == 0.0


# Processes


@pytest.mark.parametrize("dies_first", [False, True])
def test_a_server_that_ignores_sigterm_and_one_that_died_go_with_all_their_processes(
    dies_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers_module, "STOP_SECONDS", 0.2)
    monkeypatch.setattr(servers_module, "LEFT_SECONDS", 0.2)
    port = free_port()
    program = (
        "import signal, subprocess, sys, runpy; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "subprocess.Popen([sys.executable, '-c', 'import signal, time;"
        " signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)']);"
        "runpy.run_module('tests.bench.scripted', run_name='__main__')"
    )
    launch = replace(script(port), command=(sys.executable, "-c", program, str(port)))
    with running(Servers([launch], tmp_path, "stubborn", "cpu")) as servers:
        servers.start(60)
        assert servers.alive()
        (leader,) = (p for p in psutil.process_iter(["cmdline"]) if str(port) in (p.info["cmdline"] or []))
        (child,) = leader.children()
        if dies_first:
            leader.kill()
            wait_for(lambda: not servers.alive())
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert not healthy(launch.url)


def test_several_instances_are_all_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    args = {"instance": {"num_replicas": 3}}
    launch = replace(script(port), deployment={"applications": [{"args": args}]})
    asked: list[str] = []

    def ready(url: str) -> int:
        asked.append(url)
        return len(asked)

    monkeypatch.setattr(servers_module, "ready_instances", ready)
    with running(Servers([launch], tmp_path, "v", "cpu")) as servers:
        servers.start(60)
    assert asked == [launch.url] * 3


def test_instances_that_take_requests_are_counted_in_the_metrics_of_an_ingress(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "# HELP conflux_router_ready_instances Instances that take requests.\n"
        "# TYPE conflux_router_ready_instances gauge\n"
        'conflux_router_ready_instances{model="m"} 2.0\n'
        'conflux_router_draining_instances{model="m"} 1.0\n'
    )
    monkeypatch.setattr(server_info.urllib.request, "urlopen", lambda url, timeout: io.BytesIO(text.encode()))
    assert server_info.ready_instances("http://127.0.0.1:1") == 2


def test_a_kept_prediction_is_of_the_same_iteration_times() -> None:
    kept = {"format": FORMAT, "kv_tokens": 5, "overrun": 1.0, "iteration_times": "the measured profile a"}
    assert compare._is_of(kept, 5, 1.0, "the measured profile a")
    assert compare._is_of(kept, 5, 1.0, None)
    assert not compare._is_of(kept, 5, 1.0, "the measured profile b")
    assert not compare._is_of(kept, 6, 1.0, None)
    assert not compare._is_of(None, 5, 1.0, None)


def test_a_server_that_does_not_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    launch = Launch((sys.executable, "-c", "raise SystemExit('no such GPU')"), {}, f"http://127.0.0.1:{free_port()}")
    with (
        pytest.raises(ServerError, match=r"v ended with status 1:(.|\n)*no such GPU"),
        running(Servers([launch], tmp_path, "v", "cpu")) as servers,
    ):
        servers.start(60)


# The comparison


def test_two_servers_are_compared_and_nothing_is_measured_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []

    def scripts(contender: Contender, site: Site, folder: Path) -> Sequence[Launch]:
        started.append(contender.name)
        return [script(free_port()) for _ in range(contender.replicas)]

    monkeypatch.setattr(compare, "launches", scripts)
    monkeypatch.setattr(compare, "find_gpus", list)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": 300, "max_position_embeddings": 512}))
    contenders = tmp_path / "contenders.yaml"
    rows = [
        {"name": "conflux-slo", "kind": "conflux", "policy": "slo"},
        {"name": "vllm-2x", "kind": "vllm", "policy": "priority", "replicas": 2},
    ]
    contenders.write_text(yaml.safe_dump(rows))
    out = tmp_path / "out"
    words = [
        "--model",
        str(model),
        "--contenders",
        str(contenders),
        "--trace",
        str(trace_file(tmp_path)),
        "--unit",
        "ms",
    ]
    words += ["--seconds", "0.5", "--rates", "20", "--ttft", "600", "--max-lag", "9", "--clients", "1"]
    words += ["--warm-seconds", "0.1", "--out", str(out)]
    assert compare.main([*words, "--only", "vllm*"]) == 0
    assert compare.main(words) == 0
    assert started == ["vllm-2x", "conflux-slo"]
    printed = capsys.readouterr().out
    row = next(line for line in printed.splitlines() if "conflux-slo | vllm-2x" in line)
    assert [cell.strip() for cell in row.split("|")[1:-1]] == [
        "20",
        "conflux-slo",
        "vllm-2x",
        "9",
        "+0.0",
        "[+0.0, +0.0]",
        "",
    ]
    report = json.loads((out / "report.json").read_text())
    assert [c["contender"]["name"] for c in report["contenders"]] == ["conflux-slo", "vllm-2x"]
    assert all(c["versions"]["vllm"] and c["commands"] for c in report["contenders"])
    assert report["contenders"][1]["points"][0]["score"]["attainment"] == 1.0
    assert (out / "report.png").stat().st_size > 1000
    assert "scripted" in (out / "report.md").read_text()
    contenders.write_text(yaml.safe_dump([{**rows[0], "budget": 4096}]))
    assert compare.main(words) == 2
    assert "another conflux-slo (budget=2048 -> 4096)" in capsys.readouterr().err
    assert compare.main([*words[:2], *words[4:], "--minutes", "0.01", "--only", "conflux-fcfs"]) == 1
    assert started == ["vllm-2x", "conflux-slo"]
    # Alone, a contender keeps its server for all seeds; with others it is started again for each.
    contenders.write_text(yaml.safe_dump(rows))
    assert compare.main([*words, "--only", "vllm*", "--repeats", "3"]) == 0
    assert started == ["vllm-2x", "conflux-slo", "vllm-2x"]
    report = json.loads((out / "report.json").read_text())
    assert [p["seed"] for p in report["contenders"][1]["points"]] == [0, 1, 2]
    assert compare.main([*words, "--repeats", "3"]) == 0
    assert started == ["vllm-2x", "conflux-slo", "vllm-2x", "conflux-slo", "conflux-slo"]
    # What turns out invalid is left to the next call.
    lagging = [*words, "--only", "vllm*", "--first-seed", "5", "--repeats", "2", "--max-lag", "1e-9"]
    assert compare.main(lagging) == 1
    assert len(started) == 6
    # A report can be made on another machine than the one that measured.
    monkeypatch.setattr(compare, "find_gpus", lambda: [{"name": "another GPU"}])
    assert compare.main([*words, "--report"]) == 0
    assert "another GPU" not in (out / "report.md").read_text()


def entry(name: str, kind: str, *points: Point) -> Entry:
    return Entry(name, kind, list(points))


def test_the_largest_rate_is_the_last_before_a_miss() -> None:
    points = [made(1.0, 0, "+" * 100), made(2.0, 0, "+" * 97 + "-" * 3), made(3.0, 0, "+" * 87 + "-" * 13)]
    assert largest_rate(points, 0.95) == (2.0, pytest.approx(2.2))
    assert largest_rate([*points, made(4.0, 0, "+" * 100)], 0.95)[0] == 2.0
    assert largest_rate(points[:2], 0.95) == (2.0, None)
    assert largest_rate(points[2:], 0.95) == (0.0, None)
    assert largest_rate([made(1.0, 0, "+" * 9, invalid="lag")], 0.95) == (0.0, None)


def test_differences_are_paired_over_the_seeds_that_both_have() -> None:
    ours = entry("conflux-slo", "conflux", made(1.0, 0, "++++"), made(1.0, 1, "++++"))
    theirs = entry("vllm", "vllm", made(1.0, 1, "++--"), made(1.0, 2, "----"), made(1.0, 0, "++++", invalid="lag"))
    difference, low, high, count = pairs(ours, theirs, 1.0) or (0.0, 0.0, 0.0, 0)
    assert (difference, count) == (0.5, 4)
    assert low <= 0.5 <= high
    assert pairs(ours, theirs, 2.0) is None
    assert "+50.0" in pairs_table([ours, theirs])
    ours.predictions[1.0, 0] = {"attainment": 0.9}
    ours.predictions[1.0, 1] = {"attainment": 0.8}
    row = next(line for line in attainment_table([ours, theirs]).splitlines() if "conflux-slo" in line)
    assert [cell.strip() for cell in row.split("|")[3:8]] == ["2", "8", "100.0", "[67.6, 100.0]", "85.0"]


def test_the_report_has_live_beside_simulated_with_the_error() -> None:
    ours = entry("conflux-slo", "conflux", made(1.0, 0, "++++"), made(1.0, 1, "+++-"), made(2.0, 0, "++++"))
    live = [p.score() for p in ours.points]
    for seed in (0, 1):
        said = {name: {p: 1.1 * v for p, v in live[seed][name].items()} for name in ("ttft", "tbt")}
        group = {"above": 0, "up_to": 1024, "counted": 4, "compliant": 3, "ttft": {"p50": 9.0, "p95": 9.5}}
        ours.predictions[1.0, seed] = {"attainment": 0.75, **said, "lengths": [group]}
    assert errors(live[0], ours.predictions[1.0, 0]) == {
        "attainment": -0.25,
        **{f"{name}_{p}": pytest.approx(0.1) for name, p in FIGURES if live[0][name]},
    }
    (row,) = [line for line in latency_table([ours]).splitlines() if "conflux-slo" in line]
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    # (100 + 75) / 2 % live, 75 % simulated; the points' errors are -25 and 0.
    assert cells[:4] == ["1", "conflux-slo", "2", "87.5 / 75.0 (-12.5)"]
    assert cells[4].endswith("(+10 %)")
    assert cells[-1] == "no"
    assert latency_table([entry("v", "vllm", *ours.points)]) == ""
    row = predicted_lengths_table(ours).splitlines()[2]
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[:4] == ["1", "1 to 1024", "8", "87.5 / 75.0"]
    assert cells[4].endswith("/ 9.00")


@pytest.mark.parametrize(
    ("log", "tokens"),
    [
        ("INFO ready: 39040 KV blocks of 64 tokens on each of 2 ranks, max_model_len 32768", 39040 * 64),
        ("INFO [kv_cache_utils.py:2177] GPU KV cache size: 1,455,808 tokens\nmore", 1_455_808),
        ("GPU KV cache size: 1,000 tokens\nGPU KV cache size: 2,000 tokens", 2000),
        ("GPU KV cache usage: 1.3%", None),
    ],
)
def test_the_live_servers_kv_memory_is_read_from_its_log(log: str, tokens: int | None) -> None:
    assert kv_tokens_in(log) == tokens


def test_a_lone_contender_whose_server_fails_is_started_again_for_the_next_seed() -> None:
    args = Namespace(first_seed=3, repeats=2, rates=[1.0, 2.0], minutes=None)
    alone = compare.Comparison(None, None, None, [Contender("a", "vllm", "fcfs")], args)  # type: ignore[arg-type]
    assert [points for _, points in alone.rounds()] == [[(1.0, 3), (2.0, 3), (1.0, 4), (2.0, 4)], [(1.0, 4), (2.0, 4)]]
    contenders = [Contender("a", "vllm", "fcfs"), Contender("b", "vllm", "fcfs", rates=(5.0,))]
    both = compare.Comparison(None, None, None, contenders, args)  # type: ignore[arg-type]
    assert [(c.name, points) for c, points in both.rounds()] == [
        ("b", [(5.0, 3)]),
        ("a", [(1.0, 3), (2.0, 3)]),
        ("a", [(1.0, 4), (2.0, 4)]),
        ("b", [(5.0, 4)]),
    ]
