# SPDX-License-Identifier: Apache-2.0
"""Programs by verl's client of a Sandbox Fusion service: an HTTP server that runs them and answers as that does."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, ClassVar

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.reward import get_custom_reward_fn

from recipe.programs import sandbox_fusion
from recipe.programs.sandbox import SandboxUnavailable
from recipe.programs.sandbox_fusion import compute_score

ADDS = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})
CALLS = json.dumps({"inputs": [[1, "2"], [3, "é"]], "outputs": [[1, "2"], [3, "é"]], "fn_name": "both"})


class Service(BaseHTTPRequestHandler):
    """``POST /run_code``; ``/broken`` and ``/failing`` are services that do not work."""

    asked: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(asked)
        if self.path == "/broken":
            self.send_error(500)
            return
        answer = {"status": "SandboxError", "message": "no container"} if self.path == "/failing" else self.run(asked)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        began = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, "-c", asked["code"]],
                input=asked["stdin"],
                capture_output=True,
                text=True,
                timeout=asked["run_timeout"],
            )
        except subprocess.TimeoutExpired:
            return {"status": "Failed", "run_result": {"status": "TimeLimitExceeded", "return_code": None}}
        result = {"status": "Finished", "return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
        result["execution_time"] = time.monotonic() - began
        return {"status": "Failed" if done.returncode else "Success", "compile_result": None, "run_result": result}

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    Thread(target=server.serve_forever, daemon=True).start()
    Service.asked.clear()
    yield f"http://127.0.0.1:{server.server_port}/run_code"
    server.shutdown()
    server.server_close()


def score(url: str, answer: str, truth: str = ADDS, **settings: Any) -> dict[str, float]:
    return compute_score(url=url, data_source="test", solution_str=answer, ground_truth=truth, **settings)


def test_right_program_scores_one_and_wrong_ones_zero(url: str) -> None:
    assert score(url, "print(sum(map(int, input().split())))") == {
        "score": 1.0,
        "acc": 1.0,
        "passed": 1.0,
        "cut_off": 0.0,
    }
    assert score(url, "print(3)", partial=True)["score"] == 0.5
    for wrong in ("print(", "raise SystemExit(1)", "print(4)"):
        assert score(url, wrong)["score"] == 0.0


def test_function_is_judged_by_its_value(url: str) -> None:
    assert score(url, "def both(a, b):\n    print('noise')\n    return [a, b]", CALLS)["score"] == 1.0
    assert score(url, "class Solution:\n    def both(self, a, b):\n        return [a, b]", CALLS)["score"] == 1.0
    assert score(url, "def both(a, b):\n    return [b, a]", CALLS)["score"] == 0.0


def test_limits_are_the_services_and_the_expected_output_is_not(url: str) -> None:
    limits = {"wall_s": 1.0, "memory_bytes": 64 << 20}
    result = score(url, "import time; time.sleep(100)", limits=limits)
    assert (result["score"], result["cut_off"]) == (0.0, 1.0)
    (asked,) = Service.asked
    assert (asked["run_timeout"], asked["memory_limit_MB"], asked["language"]) == (1, 64, "python")
    assert score(url, "print('x' * 1000)", limits={"output_bytes": 100})["cut_off"] == 1.0
    assert "7" not in Service.asked[-1]["code"] + Service.asked[-1]["stdin"]


@pytest.mark.parametrize(("path", "why"), [("/broken", "500"), ("/failing", "no container"), (":1/x", "Connection")])
def test_service_that_fails_is_no_answers_fault(url: str, path: str, why: str) -> None:
    failing = f"http://127.0.0.1{path}" if path.startswith(":") else url.replace("/run_code", path)
    with pytest.raises(SandboxUnavailable, match=why):
        score(failing, "print(3)")


def test_verl_loads_it_by_its_path_with_its_settings(url: str) -> None:
    settings = {
        "path": sandbox_fusion.__file__,
        "name": "compute_score",
        "reward_kwargs": {"url": url, "partial": True},
    }
    function = get_custom_reward_fn(OmegaConf.create({"reward": {"custom_reward_function": settings}}))
    assert function is not None
    result = function(data_source="test", solution_str="print(3)", ground_truth=ADDS, extra_info={})
    assert result["score"] == 0.5
