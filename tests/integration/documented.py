# SPDX-License-Identifier: Apache-2.0
"""Every command in the documentation and examples that starts a run, with the arguments that its program gets.

Commands are extracted from the files: fenced shell blocks and inline code of the pages, and the arguments that each
script passes to Python. In a page `...` stands for the README's command for accelerators, and `<the script's
arguments>` for those of a script of stock verl's.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.global_hydra import GlobalHydra

from hydra_plugins.recipe_searchpath import verl_config_folder

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
from published import GRPO_GSM8K

CHECKOUT = Path(__file__).parents[2]
PAGES = sorted([CHECKOUT / "README.md", *(CHECKOUT / "docs").glob("*.md"), *(CHECKOUT / "recipe").glob("*/README.md")])
SCRIPTS = sorted([*(CHECKOUT / "examples").glob("*.sh"), *(CHECKOUT / "recipe").glob("*/*.sh")])
SHOW_ARGUMENTS = (
    'python() { printf "%s\\n" "$@"; }; export -f python; python3() { python "$@"; }; export -f python3; exec bash "$0"'
)
MODES = re.compile(r"^(\w+)\)$", re.MULTILINE)
MAIN = re.compile(r"python3? -m (recipe\.\w+\.main|verl\.trainer\.main_ppo)\b(.*)")
FENCED = re.compile(r"```bash\n(.*?)```", re.DOTALL)
INLINE = re.compile(r"`(python -m [^`]*)`")
STOCK_MAIN = "verl.trainer.main_ppo"
PATHS = {"data.train_files": "/data/train.parquet", "data.val_files": "/data/val.parquet"}
# The form of a script for stock verl's asynchronous mains.
STOCK_SCRIPT = [
    *(f"{setting}={path}" for setting, path in PATHS.items()),
    "data.max_prompt_length=1024",
    "data.max_response_length=2048",
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.rollout.n=16",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.7",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "trainer.n_gpus_per_node=4",
    "rollout.n_gpus_per_node=4",
]


@dataclass(frozen=True)
class Command:
    """A main and its arguments, and the place where they are documented."""

    where: str
    main: str
    arguments: tuple[str, ...]

    @property
    def is_stock(self) -> bool:
        return self.main == STOCK_MAIN

    @property
    def flag(self) -> str | None:
        return next((item.removeprefix("+recipe=") for item in self.arguments if item.startswith("+recipe=")), None)

    def without(self, *settings: str) -> Command:
        kept = tuple(item for item in self.arguments if item.partition("=")[0] not in settings)
        return Command(self.where, self.main, kept)

    def and_also(self, *arguments: str) -> Command:
        return Command(self.where, self.main, (*self.arguments, *arguments))


def composed(command: Command) -> Any:
    """Return the configuration that the command's main would get."""
    GlobalHydra.instance().clear()
    arguments = list(command.arguments)
    if command.is_stock:
        with initialize_config_dir(verl_config_folder(), version_base=None):
            return compose("ppo_trainer", overrides=arguments)
    mode = command.main.split(".")[1]
    primary = f"{mode}_ppo_trainer"
    if arguments[0] == "--config-name":
        primary, arguments = arguments[1], arguments[2:]
    with initialize_config_module(f"recipe.{mode}.config", version_base=None):
        return compose(primary, overrides=arguments)


@cache
def commands() -> tuple[Command, ...]:
    """Return all commands without duplicates."""
    found = {(command.main, command.arguments): command for command in (*of_pages(), *of_scripts())}
    return tuple(found.values())


def of_pages() -> Iterator[Command]:
    complete = for_accelerators()
    for page in PAGES:
        for main, words in _lines(page.read_text("utf-8")):
            arguments = tuple(_completed(main, words, complete.arguments))
            if arguments and "--cfg" not in arguments:
                yield Command(f"{page.relative_to(CHECKOUT)}: {' '.join(words)[:60]}", main, arguments)


def for_accelerators() -> Command:
    """Return the README's command for accelerators, which has no preset and no dots."""
    lines = _lines((CHECKOUT / "README.md").read_text("utf-8"))
    ((main, words),) = [
        (main, words) for main, words in lines if main != STOCK_MAIN and "preset" not in " ".join(words)
    ]
    return Command("README.md", main, tuple(words))


def _lines(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield main and arguments of each line that starts one, joining continued lines."""
    blocks = [*FENCED.findall(text), *INLINE.findall(FENCED.sub("", text))]
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        found = MAIN.search(line)
        if found:
            words = found[2].replace("<the script's arguments>", "<script>").replace("$HOME", "/home/someone")
            yield found[1], shlex.split(words.replace("$PWD", "/home/someone/checkout"), comments=True)


def _completed(main: str, words: Sequence[str], complete: Sequence[str]) -> Iterator[str]:
    if "..." in words:
        # The mode-specific arguments of the README's command do not apply to other modes.
        of_mode = ("async_training.", "rollout.total_rollout_steps")
        yield from complete if "fully_async" in main else (item for item in complete if not item.startswith(of_mode))
    for word in words:
        setting, _, value = word.partition("=")
        if word == "<script>":
            yield from _script(main)
        elif value == "...":
            yield f"{setting}={PATHS.get(setting, 'Qwen/Qwen2.5-0.5B-Instruct')}"
        elif word != "...":
            yield word


def _script(main: str) -> list[str]:
    if main != STOCK_MAIN:
        return STOCK_SCRIPT
    return [*GRPO_GSM8K, *(f"{setting}={path}" for setting, path in PATHS.items()), f"{MODEL}=Qwen/Qwen2.5-7B-Instruct"]


MODEL = "actor_rollout_ref.model.path"


def of_scripts() -> Iterator[Command]:
    for script, mode in cases():
        finished = shown(script, mode)
        assert finished.returncode == 0, finished.stderr
        _, main, *rest = finished.stdout.splitlines()
        yield Command(f"{script.relative_to(CHECKOUT)} {mode or ''}".strip(), main, tuple(rest))


def cases() -> list[tuple[Path, str | None]]:
    """Return each script with each of its modes, or with None if it has only one."""
    return [(script, mode) for script in SCRIPTS for mode in (MODES.findall(script.read_text()) or [None])]


def shown(script: Path, mode: str | None) -> subprocess.CompletedProcess[str]:
    environment = {"HOME": "/home/someone", "PATH": os.environ["PATH"]} | ({"MODE": mode} if mode else {})
    return subprocess.run(
        ["bash", "-c", SHOW_ARGUMENTS, str(script)],
        capture_output=True,
        text=True,
        timeout=30,
        env=environment,
        check=False,
    )
