# SPDX-License-Identifier: Apache-2.0
"""A run of the pure core with its real checkpoints on disk, repeatedly killed with SIGKILL.

`python crash_run.py FOLDER KILLS SEED` prints one JSON object: the kills by phase, and the findings of each life. The
ledger, the prompt source over a real stateful loader, the rollout side of a checkpoint, its commit and its retention
are those of a run. Engines are replaced by invented answers, the model by the list of prompts trained into it, and
Ray's object store by a dictionary.

Each life is a fork. It asserts at its beginning that weights and ledger agree, and at its end that every prompt was
trained exactly once, or filtered or failed by the rules of the run.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import random
import signal
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from checkpointed import SCORED, plan
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from recipe.async_engine.config.sections import AsyncTraining
from recipe.async_engine.core.gate import GateSettings
from recipe.async_engine.core.groups import Group, GroupState
from recipe.async_engine.core.ledger import SampleLedger
from recipe.async_engine.core.policy import OldestReady, WholeBatches
from recipe.async_engine.rollout.prompts import IndexedDataset, PromptSource, collate
from recipe.async_engine.trainer import checkpoints, rollout_state
from recipe.async_engine.trainer.checkpoints import RunState

PHASES = (
    "start",
    "load",
    "generate",
    "train",
    "publish",
    "write rollout side",
    "write model",
    "write tracker",
    "commit",
    "retain",
)
PROMPTS, EPOCHS = 45, 2
LIFE_S = 30.0


class Phases:
    """The present phase of a life and how often each was entered, in memory that its parent reads after the kill."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 4 * (1 + len(PHASES)))

    def clear(self) -> None:
        self._memory[:] = bytes(len(self._memory))

    def enter(self, phase: str) -> None:
        place = 4 * (1 + PHASES.index(phase))
        struct.pack_into("I", self._memory, place, self.entered(phase) + 1)
        struct.pack_into("I", self._memory, 0, PHASES.index(phase))

    def entered(self, phase: str) -> int:
        return struct.unpack_from("I", self._memory, 4 * (1 + PHASES.index(phase)))[0]

    @property
    def now(self) -> str:
        return PHASES[struct.unpack_from("I", self._memory, 0)[0]]

    def around(self, owner: ModuleType | type, name: str, phase: str) -> None:
        """Make calls of this function enter the phase; after a call the previous phase continues."""
        function = getattr(owner, name)

        def entering(*args: Any, **kwargs: Any) -> Any:
            before = self.now
            self.enter(phase)
            result = function(*args, **kwargs)
            self.enter(before)
            return result

        setattr(owner, name, entering)


class ObjectStore:
    """Stands for Ray's object store, in this process."""

    exceptions = SimpleNamespace(RayError=KeyError)

    def __init__(self) -> None:
        self.objects: list[Any] = []

    def put(self, value: Any) -> int:
        self.objects.append(value)
        return len(self.objects) - 1

    def get(self, reference: int, timeout: float) -> Any:
        return self.objects[reference]


class Life:
    """One process of a run: resumes, works and saves until the data is used up."""

    def __init__(self, root: Path, settings: dict[str, Any], rng: random.Random, phases: Phases) -> None:
        self.root, self.settings, self.rng, self.phases = root, settings, rng, phases
        self.store = rollout_state.ray = ObjectStore()
        self.model: list[list[int]] = []
        self.step = 0
        self.groups: dict[int, dict[str, Any]] = {}
        trainer = {"default_local_dir": str(root), "save_freq": 1, "resume_mode": "auto"}
        keep = {"max_actor_ckpt_to_keep": settings["keep"]}
        training = plan(
            batch_groups=settings["b"],
            batches_per_version=settings["k"],
            max_staleness=settings["bound"],
            pipeline_depth=settings["depth"],
        )
        training.settings.async_training = AsyncTraining(
            admission_policy="whole_batches" if settings["whole"] else None
        )
        config = OmegaConf.create({"trainer": {**trainer, **keep}})
        self.state = RunState(config, training, {"settings": "of this run"})
        phases.enter("load")
        self.found = self.resume()
        phases.enter("generate")

    def resume(self) -> dict[str, int]:
        rows = IndexedDataset([{"raw_prompt": [{"role": "user", "content": f"prompt {n}"}]} for n in range(PROMPTS)])
        sampler = RandomSampler(rows, generator=torch.Generator().manual_seed(7))
        loader = StatefulDataLoader(rows, batch_size=1, sampler=sampler, collate_fn=partial(collate, defaults={}))
        self.source = PromptSource(loader, EPOCHS)
        gate = GateSettings(*(self.settings[name] for name in ("b", "k", "bound", "depth")))
        policy = WholeBatches() if self.settings["whole"] else OldestReady()
        folder = self.state.find()
        snapshot = self.state.load(self.source)
        if snapshot is None:
            self.ledger = SampleLedger(gate, policy=policy)
            found = {"step": 0, "ready": 0}
        else:
            weights = json.loads((Path(folder or "") / "model.json").read_text())
            self.model, self.step = weights["trained"], weights["step"]
            self.ledger = SampleLedger.restore(snapshot["ledger"], gate, policy=policy)
            self.groups = snapshot["groups"]
            found = {"step": self.step, "ready": self.ledger.counts().ready}
            assert found["ready"] == weights["ready"], "complete answers of the checkpoint are gone"
        self.check()
        return found

    def check(self) -> None:
        """Check that weights and ledger agree, and that ready groups were sampled by weights that this run has."""
        trained = [tuple(key) for key in self.model]
        rows = self.ledger.trained_prompts()
        assert len(trained) == len(set(trained)), "a prompt is in the weights twice"
        assert set(trained) == {(epoch, index) for epoch, first, end in rows for index in range(first, end)}
        for group in self.ledger.in_state(GroupState.READY):
            (reference,) = self.groups[group.id]["payloads"]
            payload = pickle.loads(self.store.get(reference, 1.0))
            assert payload["prompt"] == list(group.prompt.key)
            assert payload["oldest"] == group.start <= payload["newest"] <= self.ledger.version
            assert group.prompt.key not in set(trained)
        self.ledger.check_identity()

    def run(self) -> None:
        while self.ledger.batch_possible(self.source.prompts_left):
            self.generate()
            if self.ledger.next_batch() is not None:
                self.train()
        self.save()
        self.check()
        counts = self.ledger.counts()
        assert counts.issued + self.source.prompts_left == PROMPTS * EPOCHS
        assert counts.trained + counts.filtered + counts.failed + counts.live == counts.issued
        assert counts.trained == len(self.model)
        assert self.settings["whole"] or counts.live + self.source.prompts_left < self.settings["b"]

    def generate(self) -> None:
        while self.ledger.can_issue() and self.rng.random() < 0.8:
            prompt = self.source.take()
            if prompt is None:
                break
            group = self.ledger.issue(prompt.reference)
            self.groups[group.id] = {"row": prompt.row, "scored": [None], "payloads": [None], "kept": [None]}
        running = self.ledger.in_state(GroupState.RUNNING)
        if running:
            self.end(self.rng.choice(running))

    def end(self, group: Group) -> None:
        chance = self.rng.random()
        if chance < 0.85:
            oldest = self.rng.randint(group.start, self.ledger.version)
            payload = {"prompt": list(group.prompt.key), "oldest": oldest, "newest": self.ledger.version}
            payload["tokens"] = self.rng.randbytes(self.rng.randrange(5000))
            self.groups[group.id].update(scored=[SCORED], payloads=[self.store.put(pickle.dumps(payload))])
            self.ledger.mark_ready(group.id, oldest)
        elif chance < 0.9:
            self.ledger.restart(group.id)
        else:
            (self.ledger.filter if chance < 0.95 else self.ledger.fail)(group.id, "reason")
            del self.groups[group.id]

    def train(self) -> None:
        self.phases.enter("train")
        for group in self.ledger.take():
            assert self.ledger.version - group.start <= self.settings["bound"]
            self.model.append(list(group.prompt.key))
            del self.groups[group.id]
        self.step += 1
        self.ledger.mark_trained()
        if self.ledger.batches_left == 0:
            self.phases.enter("publish")
            self.ledger.seal()
            version = self.ledger.announce()
            if version % self.settings["save_every"] == 0:
                self.save()
        self.phases.enter("generate")

    def save(self) -> None:
        groups = {group_id: dict(group) for group_id, group in self.groups.items()}
        snapshot = {"ledger": self.ledger.snapshot(), "source": self.source.state(), "groups": groups}
        snapshot["interrupted_tokens"] = {"cut": 0, "lost": 0, "trained": 0}
        self.state.save(self.step, snapshot, self.save_as_verl)()

    def save_as_verl(self) -> None:
        """Write the files of verl's checkpoint in its order, the tracker last and not atomically."""
        folder = checkpoints.folder_of(self.root, self.step)
        self.phases.enter("write model")
        saved = {"trained": self.model, "step": self.step, "ready": self.ledger.counts().ready}
        (folder / "model.json").write_text(json.dumps(saved))
        torch.save({}, folder / "data.pt")
        self.phases.enter("write tracker")
        with open(self.root / checkpoints.TRACKER, "w") as file:
            file.write(str(self.step))


def live(root: Path, settings: dict[str, Any], seed: str, phases: Phases) -> None:
    """Run a life in a forked process; never return."""
    code = 1
    try:
        life = Life(root, settings, random.Random(seed), phases)
        with open(root / "lives.jsonl", "a") as file:
            file.write(json.dumps(life.found) + "\n")
        life.run()
        code = 0
    finally:
        if code:
            sys.excepthook(*sys.exc_info())
        os._exit(code)


def kill_somewhere(child: int, rng: random.Random, phases: Phases) -> str | None:
    """Kill the life a moment after it has entered a random phase some times; return None if it ended before."""
    phase, times = rng.choice(PHASES[1:]), rng.choice((1, 1, 1, 2, 6))
    moment = rng.random() * rng.choice((0.0002, 0.002, 0.01))
    deadline = time.monotonic() + LIFE_S
    while phases.entered(phase) < times:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert status == 0, f"a life ended with {status}"
            return None
        assert time.monotonic() < deadline, f"a life hangs in {phases.now}"
        time.sleep(0.0001)
    time.sleep(moment)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if status == 0:
        return None
    assert os.WTERMSIG(status) == signal.SIGKILL, f"a life ended with {status}"
    return phases.now


def spawn(call: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        call()
    return child


def drill(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Run until there are this many kills, each run with up to 20 of them and then to its end."""
    rng, phases = random.Random(seed), Phases()
    phases.around(rollout_state, "save", "write rollout side")
    phases.around(checkpoints, "commit", "commit")
    phases.around(checkpoints, "retain", "retain")
    by_phase: Counter[str] = Counter()
    result: dict[str, Any] = {"runs": 0, "resumed": 0, "ready": 0}
    while by_phase.total() < kills:
        bound = rng.choice((0, 1, 2))
        whole = bound < 2 and rng.random() < 0.3
        settings = {
            "b": rng.choice((2, 3, 4)),
            "k": 1 if whole else rng.choice((1, 2)),
            "bound": bound,
            "depth": bound if whole else rng.uniform(0, bound),
            "whole": whole,
            "save_every": rng.choice((1, 2, 4)),
            "keep": rng.choice((None, 1, 2)),
        }
        root = folder / f"run-{result['runs']}"
        root.mkdir()
        for attempt in range(21):
            phases.clear()
            lifeline = f"{seed}-{result['runs']}-{attempt}"
            child = spawn(lambda root=root, settings=settings, key=lifeline: live(root, settings, key, phases))
            if attempt == 20:
                _, status = os.waitpid(child, 0)
                assert status == 0, f"the last life of {settings} ended with {status}"
                break
            phase = kill_somewhere(child, rng, phases)
            if phase is None:
                break
            by_phase[phase] += 1
        found = [json.loads(line) for line in (root / "lives.jsonl").read_text().splitlines()]
        result["resumed"] += sum(life["step"] > 0 for life in found)
        result["ready"] += sum(life["ready"] for life in found)
        result["runs"] += 1
    return {**result, "kills": by_phase.total(), "by_phase": dict(by_phase)}


if __name__ == "__main__":
    print(json.dumps(drill(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))  # noqa: T201 - read by the test
