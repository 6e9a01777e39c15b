# SPDX-License-Identifier: Apache-2.0
"""The built-in task: data in verl's schema, a warm-started model, a truthful reward, and one complete directory.

The learning itself is measured end to end by the main's own tests; here the model's start and its answers' lengths are.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import filelock
import pytest
from surroundings import shared_forks, usual_environment

from recipe.laptop.task import TaskDirectoryError, TaskPaths, TaskSettings, ensure_task, reward, warm_start
from recipe.laptop.task.__main__ import main
from recipe.laptop.task.builder import is_complete
from recipe.laptop.task.problems import apply_operation
from recipe.laptop.task.reward import ScorePermuter, compute_score

SMALL = {"train_size": 60, "val_size": 40}


@pytest.fixture
def short_warm_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a task in a second: for tests that do not look at what the model knows."""
    make = warm_start.make_warm_model
    monkeypatch.setattr(
        warm_start, "make_warm_model", lambda settings, tokenizer, keys: make(settings, tokenizer, keys, steps=3)
    )


def read_rows(path: Path) -> list[dict[str, Any]]:
    from pyarrow import parquet

    return parquet.read_table(path).to_pylist()


@pytest.fixture(scope="module")
def answers(long_tail_task: TaskPaths) -> list[tuple[dict[str, Any], list[int], str]]:
    """One answer at temperature 1.0 to each validation prompt: the row, the tokens with the end token, the text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(long_tail_task.model)
    model = AutoModelForCausalLM.from_pretrained(long_tail_task.model, dtype=torch.float32)
    rows = read_rows(long_tail_task.val)
    prompts = tokenizer.apply_chat_template(
        [row["prompt"] for row in rows], add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        output = model.generate(**prompts, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=160)
    found = []
    for row, tokens in zip(rows, output[:, prompts["input_ids"].shape[1] :].tolist(), strict=True):
        end = tokens.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in tokens else len(tokens)
        found.append((row, tokens[:end], tokenizer.decode(tokens[:end], skip_special_tokens=True)))
    return found


def test_import_is_light() -> None:
    heavy = "torch transformers tokenizers pandas pyarrow verl ray vllm"
    code = f"import recipe.laptop.task, sys; print([m for m in '{heavy}'.split() if m in sys.modules])"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_reward_module_is_self_contained() -> None:
    import ast

    imports = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(Path(reward.__file__).read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imports <= set(sys.stdlib_module_names)


@pytest.mark.parametrize(
    ("operation", "answer"), [("sort", "13679"), ("flip", "71963"), ("copy", "36917"), ("list", None)]
)
def test_operations_have_one_right_answer(operation: str, answer: str | None) -> None:
    expected = answer or "".join(f"{digit}{letter}" for digit in "36917" for letter in "abcdefghijkl")
    assert apply_operation(operation, "36917") == expected


def test_right_answer_scores_and_anything_else_does_not() -> None:
    assert compute_score("d", "123456", "123456") == {"score": 1.0, "acc": 1.0}
    for wrong in ("", "12345", "1234567", " 123456", "123456\n", "1 2 3 4 5 6", "123465", "<|user|>123456", "abc"):
        assert compute_score("d", wrong, "123456", {"split": "train"}) == {"score": 0.0, "acc": 0.0}


def test_reward_takes_the_arguments_verl_adds() -> None:
    assert compute_score("d", "1", "1", None, reward_router_address="a", reward_model_tokenizer=None)["score"] == 1.0


def test_permuted_scores_are_a_permutation_up_to_the_reservoir() -> None:
    permuter = ScorePermuter(window=64, seed=3)
    start = list(permuter.reservoir)
    scores = [float(value) for value in range(1000)]
    handed_out = [permuter.exchange(score) for score in scores]
    assert sorted(start + scores) == sorted(handed_out + permuter.reservoir)
    assert handed_out != scores


def test_permuted_scores_keep_their_distribution_and_say_nothing_about_the_answer() -> None:
    rng = random.Random(5)
    truth = [rng.random() < 0.35 for _ in range(20_000)]
    extra = {"split": "train"}
    results = [compute_score("d", "1" if right else "0", "1", extra, permute=True) for right in truth]
    scores = [result["score"] for result in results]
    assert [result["acc"] for result in results] == [float(right) for right in truth]
    assert set(scores) == {0.0, 1.0}
    assert abs(sum(scores) - sum(truth)) <= 64
    mean, count = sum(truth) / len(truth), len(truth)
    covariance = sum((score - mean) * (right - mean) for score, right in zip(scores, truth, strict=True)) / count
    # Four standard errors of the correlation of independent streams.
    assert abs(covariance / (mean * (1 - mean))) < 4 / count**0.5


@pytest.mark.parametrize("split", ["val", "test", None])
def test_permutation_never_touches_validation(split: str | None) -> None:
    extra = {"split": split} if split else None
    for index in range(200):
        answer = "1" if index % 3 == 0 else "0"
        assert compute_score("d", answer, "1", extra, permute=True)["score"] == float(answer)


def test_permuter_loses_no_score_under_threads() -> None:
    permuter = ScorePermuter(window=64, seed=0)
    start, handed_out = list(permuter.reservoir), [[] for _ in range(4)]

    def work(part: int) -> None:
        handed_out[part].extend(permuter.exchange(float(part * 1000 + index)) for index in range(1000))

    threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    put_in = [float(value) for value in range(4000)]
    assert sorted(start + put_in) == sorted([*itertools.chain(*handed_out), *permuter.reservoir])


@pytest.mark.parametrize(
    "wrong",
    [{"family": "llama"}, {"lengths": "short"}, {"train_size": 0}, {"val_size": 0}, {"seed": -1}, {"val_size": 10**6}],
)
def test_wrong_setting_is_refused_by_name(wrong: dict[str, Any]) -> None:
    name, value = next(iter(wrong.items()))
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        TaskSettings(**wrong)


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_same_settings_give_the_same_bytes(tmp_path: Path, short_warm_start: None, family: str) -> None:
    first, second, other = (
        ensure_task(tmp_path / name, TaskSettings(seed=seed, family=family, **SMALL))
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    for attribute, name in (("model", "model.safetensors"), ("train", ""), ("val", "")):
        contents = [(getattr(paths, attribute) / name).read_bytes() for paths in (first, second, other)]
        assert contents[0] == contents[1]
        assert contents[0] != contents[2]
    config = json.loads((first.model / "config.json").read_text())
    assert config["model_type"] == family
    assert config["hidden_size"] // config["num_attention_heads"] == 32
    assert config.get("head_dim", 32) == 32


def test_weights_are_fp32_and_not_tied(tmp_path: Path, short_warm_start: None) -> None:
    import torch
    from safetensors.torch import load_file

    weights = load_file(ensure_task(tmp_path / "t", TaskSettings(**SMALL)).model / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(weights)


def test_rows_have_verls_schema_and_splits_are_disjoint(tmp_path: Path, short_warm_start: None) -> None:
    paths = ensure_task(tmp_path / "t", TaskSettings(**SMALL))
    keys: dict[str, set[str]] = {}
    for split, path in (("train", paths.train), ("val", paths.val)):
        rows = read_rows(path)
        assert len(rows) == SMALL[f"{split}_size"]
        assert [row["extra_info"]["index"] for row in rows] == list(range(len(rows)))
        for row in rows:
            assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
            assert row["reward_model"]["style"] == "rule"
            assert row["extra_info"]["split"] == split
            [message] = row["prompt"]
            operation, key = message["content"].split()
            assert message["role"] == "user"
            assert apply_operation(operation, key) == row["reward_model"]["ground_truth"]
            assert len(row["reward_model"]["ground_truth"]) == 5
        keys[split] = {row["prompt"][0]["content"].split()[1] for row in rows}
        assert len(keys[split]) == len(rows)
    assert not keys["train"] & keys["val"]


def test_verl_reads_the_data_set_and_loads_the_reward(tmp_path: Path, short_warm_start: None) -> None:
    from omegaconf import OmegaConf
    from verl.utils import hf_tokenizer
    from verl.utils.dataset.rl_dataset import RLHFDataset
    from verl.utils.import_utils import load_extern_object

    paths = ensure_task(tmp_path / "t", TaskSettings(**SMALL))
    config = OmegaConf.create({"cache_dir": str(tmp_path / "cache"), "max_prompt_length": 32})
    dataset = RLHFDataset(str(paths.train), hf_tokenizer(str(paths.model)), config)
    row = dataset[0]
    assert len(dataset) == SMALL["train_size"]
    assert row["raw_prompt"][0]["role"] == "user"
    score = load_extern_object(str(paths.reward_file), "compute_score")
    truth = row["reward_model"]["ground_truth"]
    assert score(row["data_source"], truth, truth, row["extra_info"])["score"] == 1.0


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_saved_tokenizer_and_chat_template_round_trip(tmp_path: Path, short_warm_start: None, family: str) -> None:
    from verl.utils import hf_tokenizer

    from recipe.laptop.task.tokenizer import build_tokenizer

    tokenizer = hf_tokenizer(str(ensure_task(tmp_path / "t", TaskSettings(family=family, **SMALL)).model))
    assert tokenizer.get_vocab() == build_tokenizer().get_vocab()
    assert len(tokenizer) == 115
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}) == 3
    text = 'Sort 73915, then: "flip"\n\t'.replace("\t", "") + "".join(map(chr, range(32, 127)))
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    chat = [{"role": "user", "content": "sort 73915"}, {"role": "assistant", "content": "13579"}]
    full = "<|user|>sort 73915<|end|><|assistant|>13579<|end|>"
    assert tokenizer.apply_chat_template(chat, tokenize=False) == full
    prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, tokenize=False)
    assert full.startswith(prompt) and prompt.endswith("<|assistant|>")
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert len(ids) == 10
    assert tokenizer.decode(ids) == prompt
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<|user|>sort 73915<|assistant|>"


def test_complete_task_is_reused_and_any_other_is_remade(tmp_path: Path, short_warm_start: None) -> None:
    out, settings = tmp_path / "t", TaskSettings(**SMALL)
    weights = ensure_task(out, settings).model / "model.safetensors"
    made = weights.stat().st_mtime_ns
    assert ensure_task(out, settings).model == weights.parent
    assert weights.stat().st_mtime_ns == made

    (out / "val.parquet").unlink()
    assert not is_complete(out, settings)
    ensure_task(out, settings)
    assert is_complete(out, settings) and weights.stat().st_mtime_ns != made

    weights.write_bytes(weights.read_bytes()[:100])
    ensure_task(out, settings)
    assert is_complete(out, settings)

    changed = TaskSettings(seed=7, **SMALL)
    assert not is_complete(out, changed)
    ensure_task(out, changed)
    assert is_complete(out, changed) and not is_complete(out, settings)


def test_leftover_of_a_dead_process_is_replaced(tmp_path: Path, short_warm_start: None) -> None:
    (tmp_path / ".t.making").mkdir()
    (tmp_path / ".t.making" / "train.parquet").write_text("half")
    ensure_task(tmp_path / "t", TaskSettings(**SMALL))
    assert is_complete(tmp_path / "t", TaskSettings(**SMALL))
    assert not (tmp_path / ".t.making").exists()


def test_directory_with_other_contents_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("do not lose")
    with pytest.raises(TaskDirectoryError, match=r"thesis\.txt.*another directory"):
        ensure_task(tmp_path, TaskSettings(**SMALL))
    assert (tmp_path / "thesis.txt").read_text() == "do not lose"


def test_waiting_for_another_process_has_a_deadline(tmp_path: Path) -> None:
    with filelock.FileLock(tmp_path / ".t.lock"), pytest.raises(TaskDirectoryError, match=r"\.t\.lock.*0\.2 s"):
        ensure_task(tmp_path / "t", TaskSettings(**SMALL), lock_timeout=0.2)


# Not multiprocessing: a spawned child would look this module up by the name `tests`, which verl's wheel has too.
MAKE_ONCE = """
import sys
from recipe.laptop.task import TaskSettings, ensure_task, warm_start

out, log, train_size, val_size = sys.argv[1:]
make = warm_start.make_warm_model

def counted(settings, tokenizer, keys):
    with open(log, "a") as file:
        file.write("made\\n")
    return make(settings, tokenizer, keys, steps=3)

warm_start.make_warm_model = counted
ensure_task(out, TaskSettings(train_size=int(train_size), val_size=int(val_size)), lock_timeout=60)
"""


def test_two_processes_make_the_task_once(tmp_path: Path) -> None:
    arguments = [str(tmp_path / "t"), str(tmp_path / "log"), str(SMALL["train_size"]), str(SMALL["val_size"])]
    command = [str(shared_forks(usual_environment())), "-c", MAKE_ONCE, *arguments]
    processes = [subprocess.Popen(command, cwd=Path(__file__).resolve().parents[2]) for _ in range(2)]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    assert (tmp_path / "log").read_text() == "made\n"
    assert is_complete(tmp_path / "t", TaskSettings(**SMALL))


def test_command_makes_a_task_and_reports_a_wrong_setting(tmp_path: Path, short_warm_start: None) -> None:
    arguments = ["--out", str(tmp_path / "t"), "--family", "qwen2", "--train-size", "60", "--val-size", "40"]
    assert main(arguments) == 0
    assert is_complete(tmp_path / "t", TaskSettings(family="qwen2", **SMALL))
    assert main([*arguments, "--seed", "-1"]) == 2


def test_one_prompt_in_twenty_gets_an_answer_of_about_twenty_times_the_median_length(
    answers: list[tuple[dict[str, Any], list[int], str]],
) -> None:
    is_long = [row["extra_info"]["operation"] == "list" for row, _, _ in answers]
    assert sum(is_long) == len(answers) // 20
    lengths = sorted(len(tokens) for _, tokens, _ in answers)
    median = lengths[len(lengths) // 2]
    assert median == 6
    long_lengths = [len(tokens) for (_, tokens, _), long in zip(answers, is_long, strict=True) if long]
    assert sorted(long_lengths)[len(long_lengths) // 2] == 121
    assert all(len(tokens) <= 32 for (_, tokens, _), long in zip(answers, is_long, strict=True) if not long)


def test_warm_start_answers_well_formed_but_mostly_wrong(answers: list[tuple[dict[str, Any], list[int], str]]) -> None:
    short = [(row, text) for row, _, text in answers if row["extra_info"]["operation"] != "list"]
    scores = [compute_score("d", text, row["reward_model"]["ground_truth"])["acc"] for row, text in short]
    skilled = [
        text in {apply_operation(name, row["prompt"][0]["content"][-5:]) for name in ("sort", "flip", "copy")}
        for row, text in short
    ]
    assert 0.2 <= sum(scores) / len(scores) <= 0.5
    assert sum(skilled) / len(skilled) > 0.8
