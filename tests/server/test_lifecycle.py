"""Starting, draining, stopping, and losing the engine."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from tests.server.conftest import PATIENCE_S, ServerProcess, flags, stats, wait_until

if TYPE_CHECKING:
    from tests.server.conftest import Start

SMALL = {"max_running_requests": 4, "max_model_len": 4096, "speculative_num_steps": 0}


class Asking(threading.Thread):
    """A request in a thread of its own."""

    def __init__(self, server: ServerProcess, **fields: Any) -> None:
        super().__init__()
        self._url = f"{server.url}/v1/completions"
        self._body = {"prompt": [5, 6], "ignore_eos": True, **fields}
        self.status = 0
        self.text = ""
        self.start()

    def run(self) -> None:
        with httpx2.Client(timeout=PATIENCE_S) as client:
            answer = client.post(self._url, json=self._body)
            self.status, self.text = answer.status_code, answer.text


def code_of(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_while_loading_it_lives_and_is_not_ready(start: Start) -> None:
    server = start(*flags(SMALL))
    with httpx2.Client(base_url=server.url, timeout=PATIENCE_S) as http:
        assert http.get("/health").json() == {"status": "loading"}
        assert code_of(http.get("/ready")) == (503, "loading")
        answer = http.post("/v1/completions", json={"prompt": "a"})
        assert code_of(answer) == (503, "loading")
        assert int(answer.headers["retry-after"]) >= 1
        assert http.get("/metrics").status_code == 200
        assert http.get("/v1/models").status_code == 503
    # a signal that comes so early ends it at once
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0


def test_a_signal_lets_requests_finish_and_a_second_one_does_not(start: Start) -> None:
    server = start(*flags(SMALL), "--drain-seconds", "600")
    server.line("ready")
    with httpx2.Client(base_url=server.url, timeout=PATIENCE_S) as http:
        long = [Asking(server, max_tokens=4000), Asking(server, max_tokens=4000, stream=True)]
        wait_until(lambda: stats(http)["num_running"] == 2)
        short = [Asking(server, max_tokens=200), Asking(server, max_tokens=200, stream=True)]
        wait_until(lambda: stats(http)["num_running"] == 4)
        engine = http.get("/server_info").json()["engine_pid"]
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: http.get("/ready").status_code == 503)
        assert code_of(http.get("/ready")) == (503, "draining")
        assert http.get("/health").json() == {"status": "draining"}
        refused = http.post("/v1/completions", json={"prompt": "a"})
        assert code_of(refused) == (503, "draining")
        assert int(refused.headers["retry-after"]) >= 1
    for thread in short:
        thread.join()
    server.process.send_signal(signal.SIGINT)
    assert [thread.status for thread in short] == [200, 200]
    assert '"completion_tokens":200' in short[0].text
    assert short[1].text.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"length"' in short[1].text
    check_cut(long)
    assert server.wait() == 0
    assert not os.path.exists(f"/proc/{engine}")


def check_cut(asking: list[Asking]) -> None:
    """Check that a whole answer and a stream were told that the server ends."""
    for thread in asking:
        thread.join()
        assert '"code":"draining"' in thread.text
    assert [thread.status for thread in asking] == [503, 200]
    assert asking[1].text.endswith("data: [DONE]\n\n")


def test_draining_has_its_time(start: Start) -> None:
    server = start(*flags(SMALL), "--drain-seconds", "0.2")
    server.line("ready")
    with httpx2.Client(base_url=server.url, timeout=PATIENCE_S) as http:
        long = [Asking(server, max_tokens=4000), Asking(server, max_tokens=4000, stream=True)]
        wait_until(lambda: stats(http)["num_running"] == 2)
        server.process.send_signal(signal.SIGINT)
    check_cut(long)
    assert server.wait() == 0


def test_the_engine_s_death_is_told_to_all_who_wait(start: Start) -> None:
    server = start(*flags(SMALL))
    server.line("ready")
    with httpx2.Client(base_url=server.url, timeout=PATIENCE_S) as http:
        engine = http.get("/server_info").json()["engine_pid"]
        running = [
            Asking(server, max_tokens=4000, n=5),
            Asking(server, max_tokens=4000, stream=True),
            Asking(server, max_tokens=4000),
        ]
        wait_until(lambda: stats(http)["num_running"] + stats(http)["num_waiting"] == 7)
        os.kill(engine, signal.SIGKILL)
    for thread in running:
        thread.join()
    for index in (0, 2):
        assert running[index].status == 500
        assert '"code":"engine_dead"' in running[index].text
    assert '"code":"engine_dead"' in running[1].text
    assert running[1].text.endswith("data: [DONE]\n\n")
    assert server.wait() == 1
    assert "the engine process was ended by signal SIGKILL" in server.log.read_text()


def test_defaults_just_work_and_say_what_they_are(start: Start) -> None:
    server = start()
    server.line("ready")
    with httpx2.Client(base_url=server.url, timeout=PATIENCE_S) as http:
        for _ in range(2):
            answer = http.post("/v1/completions", json={"prompt": [5] * 40}).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
        (model,) = http.get("/v1/models").json()["data"]
        found = http.get("/server_info").json()
    assert found["stats"]["decode"]["proposed_at"][0] > 0
    log = server.log.read_text()
    limits = set(re.findall(r"context (\d+) tokens", log)) | {str(model["max_model_len"])}
    assert limits == {str(found["engine"]["max_model_len"])}
    assert "prefix cache on, prefixes are resumed at snapshots of state" in log
    assert "speculation mtp, 3 drafts" in log
    # of both processes
    assert log.count("objects are here to stay") == 2
    engine = found["engine_pid"]
    # its end is the engine's, too, however it comes
    server.close()
    wait_until(lambda: not is_running(engine), 5)


def is_running(pid: int) -> bool:
    """Whether a process exists, and is more than an exit status that nobody has read."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_model_that_cannot_be_served_is_told_in_one_line(start: Start) -> None:
    server = start("/none")
    assert server.wait() == 2
    lines = server.log.read_text().splitlines()
    assert [line for line in lines if "ERROR" in line or "Traceback" in line] == []
    assert lines[-1].startswith("gapless: ModelError: ")
    assert "/none" in lines[-1]


def test_a_port_in_use_is_seen_before_anything_is_loaded(capfd: pytest.CaptureFixture) -> None:
    from gapless.cli import main

    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert f"port={port} cannot be listened on" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--port", "70000"), "port=70000: want 0 to 65535"),
        (("--api-key", ""), "api_key=''"),
        (("--served-model-name", ""), "served_model_name=''"),
        (("--max-body-bytes", "10"), "max_body_bytes=10: want at least 1024"),
        (("--request-timeout-seconds", "0"), "request_timeout_seconds=0.0: want more than 0"),
        (("--request-timeout-seconds", "nan"), "request_timeout_seconds=nan: want more than 0"),
        (("--drain-seconds", "-1"), "drain_seconds=-1.0: want a number of at least 0"),
        (("--drain-seconds", "inf"), "drain_seconds=inf: want a number"),
        (("--chat-template", "/none"), "chat_template='/none' cannot be read"),
        (("--chat-template", "{% if %}"), "chat_template: "),
        (("--log-level", "loud"), "log level 'loud'"),
        (("a", "--model", "b"), "'a' and model='b' were both given"),
        (("--host", "no.such.host.invalid"), "host='no.such.host.invalid'"),
    ],
)
def test_mistakes_are_told_at_once(
    capfd: pytest.CaptureFixture, argv: tuple[str, ...], message: str
) -> None:
    from gapless.cli import main

    assert main(["serve", "--port", "0", *argv]) == 2
    assert message in capfd.readouterr().err
