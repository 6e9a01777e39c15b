# SPDX-License-Identifier: Apache-2.0
"""Only the folders of engines and the configuration name a rollout engine, so that another one changes little else."""

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "recipe"
ROOMS = ("config", "engines", "engines.py")
ENGINE = re.compile("sglang|vllm", re.IGNORECASE)
FILES = sorted(file.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py") if not set(file.parts) & set(ROOMS))


def named_in(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if ENGINE.search(line)]


def test_no_other_room_names_an_engine() -> None:
    found = {str(file): named_in((PACKAGE / file).read_text()) for file in FILES}
    assert {file: lines for file, lines in found.items() if lines} == {}


def test_the_rule_sees_code_and_prose_and_covers_the_package() -> None:
    assert named_in("x = 1\nimport vllm.config\n# as SGLang has it\n") == ["import vllm.config", "# as SGLang has it"]
    assert {"trainer", "rollout", "weights", "run", "core"} <= {file.parts[1] for file in FILES if len(file.parts) > 2}
