# SPDX-License-Identifier: Apache-2.0
"""Well-known libraries of agents, unchanged, at a trajectory's address: each uses a tool, and is trained on its tokens.

They are installed in a folder beside the other packages (requirements/agents.txt); without it these tests are skipped.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from scripted_policy import ScriptedClient, agent_loop, called, check_trained, tokenizer

FOLDER = Path(sys.prefix, "agents")
PROGRAM = Path(__file__).with_name("library_agents.py")
CHAT, RESPONSES = [], ["responses"]


REWRITES = {"smolagents"}
"""Libraries that send an answer back as a text of their own, so that it is context in what follows."""


@pytest.mark.skipif(not FOLDER.exists(), reason="requirements/agents.txt is not installed")
@pytest.mark.parametrize("stream", [[], ["stream"]], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("library", "interface"),
    [
        ("openai_agents", CHAT),
        ("openai_agents", RESPONSES),
        ("pydantic_ai", CHAT),
        ("pydantic_ai", RESPONSES),
        ("smolagents", CHAT),
        ("langgraph", CHAT),
        ("langgraph", RESPONSES),
    ],
)
async def test_a_librarys_agent_uses_a_tool_and_is_trained_as_it_was_sampled(
    library: str, interface: list[str], stream: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    final = called("final_answer", answer="3") if library == "smolagents" else "It is 3."
    client = ScriptedClient([f"I add.\n{called('add', a=1, b=2)}", final])
    command = shlex.join([sys.executable, str(PROGRAM), library, *interface, *stream])
    loop = agent_loop(client, command=command, deadline_s=120.0, passed="PYTHONDONTWRITEBYTECODE")
    outputs = await loop.run({"temperature": 1.0}, raw_prompt=[])
    check_trained(client, outputs)
    assert len(client.sampled) == 2
    assert isinstance(outputs, list) == (library in REWRITES)
    for output in outputs if isinstance(outputs, list) else [outputs]:
        assert output.reward_score == 1.0
        assert "3" in output.extra_fields["reward_extra_info"]["answer"]
        assert output.extra_fields["agent_unmatched_share"] == float(library in REWRITES)
    if library not in REWRITES:
        assert "<tool_response>\n3\n" in tokenizer().decode(outputs.response_ids)
