"""Engines that already run: one clear error for each wrong address or model, no process touched."""

import contextlib
import json
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from fake_engine import refused_url
from patience import eventually

from slime.engines import external
from slime.engines.external import ExternalServer, discover, read_address
from slime.engines.fleet import EngineFleet, WatchPolicy
from slime.wire.protocol import EngineInfo

OURS = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2}


class _PatientServer(ThreadingHTTPServer):
    request_queue_size = 128  # a busy machine lets connections wait


class Engine:
    """Answers like an engine, as far as discovery asks; computes nothing."""

    def __init__(self, info: object, port: int = 0, status: int = 200):
        answers = {"/get_server_info": info, "/model_info": {}, "/health_generate": {}}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps(answers.get(self.path)).encode()
                self.send_response(status if self.path in answers else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.server = _PatientServer(("127.0.0.1", port), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def serve():
    with contextlib.ExitStack() as stack:

        def start(info: object = None, **options) -> Engine:
            described = {"model_path": "org/model", "version": "0.5.23"} if info is None else info
            engine = Engine(described, **options)
            stack.callback(engine.close)
            return engine

        yield start


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(OURS))
    return str(tmp_path)


def test_engines_are_asked_what_they_are(serve, model):
    one = serve({"model_path": "org/model", "version": "0.5.23", "vocab_size": 512, "tp_size": 2})
    two = serve({"model_path": model, "version": "0.5.23", "disaggregation_mode": "null"})
    engines = discover([f"127.0.0.1:{one.port}", f"http://127.0.0.1:{two.port}/"], model)
    assert [engine.url for engine in engines] == [f"http://127.0.0.1:{port}" for port in (one.port, two.port)]
    assert engines[0].info.num_ranks == 2 and {engine.worker_type for engine in engines} == {"regular"}


@pytest.mark.parametrize(
    ("said", "ways"),
    [
        ({"tp_size": 4}, ("disk", "tensor", "distributed")),
        ({"tp_size": 4, "dp_size": 4, "enable_dp_attention": True}, ("disk", "tensor", "distributed")),
        (
            {"tp_size": 4, "dp_size": 1, "attn_dp_size": 4, "enable_dp_attention": True},
            ("disk", "tensor", "distributed"),
        ),
        ({"tp_size": 4, "dp_size": 2, "attn_dp_size": 4, "enable_dp_attention": True}, ("disk",)),
        ({"tp_size": 2, "pp_size": 2}, ("disk",)),
        ({"tp_size": 2, "dp_size": 2}, ("disk",)),
    ],
)
def test_weights_go_only_to_ranks_that_can_be_addressed(said, ways):
    info = EngineInfo.from_json({"model_path": "m", "version": "0.5.23", **said})
    assert info.transports == ways


def test_prefill_engines_bring_their_bootstrap_port(serve, model):
    info = {"model_path": "m", "disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 8998}
    [engine] = discover([f"127.0.0.1:{serve(info).port}"], model)
    assert (engine.worker_type, engine.bootstrap_port) == ("prefill", 8998)


@pytest.mark.parametrize(
    "address", ["10.0.0.5", "host:port", "ftp://a:1", "http://a:1/generate", ":80", "a:70000"]
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ValueError, match=r"--rollout-external-engine-addrs: .* write host:port"):
        read_address(address)


def test_nobody_at_an_address_is_one_error_that_names_it(model):
    url = refused_url()
    with pytest.raises(ValueError, match=rf"no engine responds at {re.escape(url)} .*start it, or correct"):
        discover([url.removeprefix("http://")], model)


def test_a_host_that_does_not_exist_is_the_same_error(model):
    with pytest.raises(ValueError, match=r"no engine responds at http://no-such-host\.invalid:30000"):
        discover(["no-such-host.invalid:30000"], model)


def test_an_address_given_twice_is_refused(serve, model):
    engine = serve()
    with pytest.raises(ValueError, match="twice; write each engine once"):
        discover([f"127.0.0.1:{engine.port}", f"http://127.0.0.1:{engine.port}"], model)


@pytest.mark.parametrize(
    ("info", "options", "message"),
    [
        ({}, {"status": 404}, "responds, but not as an engine"),
        (["garbage"], {}, "not with an engine's server info"),
        ({"hello": 1}, {}, "names no model"),
        (
            {"model_path": "org/x", "vocab_size": 1000},
            {},
            "serves org/x with vocab_size 1000, but --hf-checkpoint .* has 512",
        ),
        ({"model_path": "org/x", "architectures": ["Llama"]}, {}, "with architectures"),
        ({"model_path": "org/x", "version": "0.4.9"}, {}, "is SGLang 0.4.9; at least 0.5"),
    ],
)
def test_a_wrong_engine_is_named(serve, model, info, options, message):
    engine = serve(info, **options)
    with pytest.raises(ValueError, match=rf"(?s)127\.0\.0\.1:{engine.port}.*{message}|{message}"):
        discover([f"127.0.0.1:{engine.port}"], model)


def test_another_model_in_a_folder_of_this_machine_is_noticed(serve, model, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({**OURS, "hidden_size": 128}))
    engine = serve({"model_path": str(other)})
    with pytest.raises(
        ValueError, match=r"with hidden_size 128, but --hf-checkpoint .* has 64; it must serve the same"
    ):
        discover([f"127.0.0.1:{engine.port}"], model)


def test_engines_of_different_versions_are_refused(serve, model):
    ports = [serve({"model_path": "m", "version": version}).port for version in ("0.5.16", "0.5.23")]
    with pytest.raises(ValueError, match="speak different dialects"):
        discover([f"127.0.0.1:{port}" for port in ports], model)


def test_an_external_engine_that_goes_and_returns_is_brought_up_to_date_and_never_ended(
    serve, model, monkeypatch
):
    monkeypatch.setattr(external, "_LOOK_INTERVAL_S", 0.05)
    engine = serve()
    joined: list[str] = []
    server = ExternalServer(discover([f"127.0.0.1:{engine.port}"], model)[0], 30.0)
    fleet = EngineFleet([server], WatchPolicy(3, 600.0, poll_s=0.02))
    fleet.keep_current(lambda: None, joined.append)
    fleet.launch()
    assert fleet.wait_ready() == (server.url,) and fleet.is_alive(server.url)
    engine.close()
    eventually(lambda: not fleet.is_alive(server.url))
    serve(port=engine.port)
    eventually(lambda: fleet.num_restarts >= 1)  # a busy machine may miss it more than once
    assert set(joined) == {server.url}
    fleet.stop()
    socket.create_connection(("127.0.0.1", engine.port), 5).close()  # it still serves


def test_an_evicted_external_engine_is_left_running_and_returns(serve, model):
    engine = serve()
    joined: list[str] = []
    server = ExternalServer(discover([f"127.0.0.1:{engine.port}"], model)[0], 30.0)
    fleet = EngineFleet([server], WatchPolicy(3, 600.0, poll_s=0.02))
    fleet.keep_current(lambda: None, joined.append)
    fleet.wait_ready()
    fleet.evict(server.url, RuntimeError("wrong version"))
    eventually(lambda: fleet.num_restarts == 1)
    assert joined == [server.url] and fleet.is_alive(server.url)
    fleet.stop()


def test_shared_memory_reaches_only_this_machine(serve, model):
    engine = serve({"model_path": "m", "engine": "embedded"})
    [found] = discover([f"127.0.0.1:{engine.port}"], model)
    server = ExternalServer(found, 1.0)
    assert "shared_memory" in server.transports(found.info)
    server.url = "http://10.0.0.5:30000"
    assert server.transports(found.info) == ("disk", "distributed")
