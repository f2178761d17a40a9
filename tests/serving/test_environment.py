"""The environment for Ray puts HAProxy in front if there is one, and its absence is noticed."""

import subprocess

from conflux_ray.serving import environment


def test_haproxy_is_put_in_front_without_splicing():
    variables = environment.serve_environment()
    assert variables["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    version = subprocess.run(
        [variables["RAY_SERVE_HAPROXY_BINARY_PATH"], "-v"],
        env={"CONFLUX_HAPROXY_BINARY": variables["CONFLUX_HAPROXY_BINARY"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "HAProxy version" in version.stdout
    assert not environment.warn_if_slow(variables)


def test_without_haproxy_the_grpc_proxy_takes_its_place(monkeypatch):
    monkeypatch.setattr(environment, "haproxy_binary", lambda: None)
    variables = environment.serve_environment()
    assert "RAY_SERVE_ENABLE_HA_PROXY" not in variables
    assert variables["RAY_SERVE_PROXY_USE_GRPC"] == "1"
    assert not environment.warn_if_slow(variables)


def test_an_environment_without_either_is_warned_of(caplog):
    assert environment.warn_if_slow({})
    assert "python -m conflux_ray.serving.environment" in caplog.text


def test_haproxy_that_splices_is_warned_of(caplog):
    assert environment.warn_if_slow({"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"})
    assert "splicing" in caplog.text
