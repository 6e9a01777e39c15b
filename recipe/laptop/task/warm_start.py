# SPDX-License-Identifier: Apache-2.0
"""Creates the built-in task's small Qwen model, which can already follow the instructions, but does so only sometimes.

The model is trained on demonstrations (prompts with answers). With probability ``TEACHER_FOLLOWS``, a demonstration's
answer follows its instruction; otherwise it follows the next instruction in the cycle sort, flip, copy. So the model's
most likely answer is wrong (greedy accuracy is low), but a group of eight samples contains right answers, from which RL
can learn. The instruction ``list`` is always followed. No demonstration uses a digit string of the validation set.
"""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING

from recipe.laptop.task.problems import LONG_OPERATION, SHORT_OPERATIONS, Problem, apply_operation, draw_key
from recipe.laptop.task.settings import TaskSettings

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

TEACHER_FOLLOWS = 0.38
STEPS = 750
BATCH_SIZE = 64
# Long demonstrations have about eight times the tokens of short ones. So they come in smaller batches, and only at
# every second step.
LONG_EVERY, LONG_BATCH_SIZE = 2, 4
LEARNING_RATE = 3e-3
WARM_UP_STEPS = 50


def build_model(settings: TaskSettings, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Return a new fp32 model with 2 layers, hidden size 64 and 2 heads of size 32: engines can run it on a CPU."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        # With Qwen's value 0.02, which is for wide layers, the warm start of this narrow model would take twice as
        # long.
        "initializer_range": 0.05,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "attn_implementation": "sdpa",
    }
    if settings.family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(head_dim=32, **shape)).float()
    return Qwen2ForCausalLM(Qwen2Config(**shape)).float()


def make_warm_model(
    settings: TaskSettings, tokenizer: PreTrainedTokenizerFast, excluded_keys: frozenset[str], steps: int = STEPS
) -> PreTrainedModel:
    """Return a model trained for ``steps`` steps on demonstrations that use none of ``excluded_keys`` (digit strings).

    Afterwards, torch's random state and number of threads are the same as before the call.
    """
    import torch

    threads = torch.get_num_threads()
    # Use one thread, because the order in which floating-point numbers are added depends on the number of threads.
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            model = build_model(settings, tokenizer)
            _imitate(model, tokenizer, settings, excluded_keys, steps)
    finally:
        torch.set_num_threads(threads)
    return model.eval()


def _imitate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    settings: TaskSettings,
    excluded_keys: frozenset[str],
    steps: int,
) -> None:
    import torch

    demonstrations = _Demonstrations(tokenizer, random.Random(f"warm-start-{settings.seed}"), excluded_keys)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS) * max(0.02, 1.0 - step / steps)
    )
    model.train()
    for step in range(steps):
        loss = _answer_loss(model, *demonstrations.short(BATCH_SIZE))
        if settings.lengths == "long_tail" and step % LONG_EVERY == 0:
            loss = loss + _answer_loss(model, *demonstrations.long(LONG_BATCH_SIZE))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            logger.info("warm start: step %d of %d, loss %.3f", step + 1, steps, loss.item())


class _Demonstrations:
    """Creates batches of demonstrations (prompts with answers).

    A batch is a pair: token ids ``[batch, tokens]``, and the number of tokens that each answer has, with its
    end token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, rng: random.Random, excluded_keys: frozenset[str]) -> None:
        self._tokenizer = tokenizer
        self._rng = rng
        self._excluded_keys = excluded_keys

    def short(self, size: int) -> tuple[torch.Tensor, int]:
        return self._batch([self._teach(self._rng.choice(SHORT_OPERATIONS)) for _ in range(size)])

    def long(self, size: int) -> tuple[torch.Tensor, int]:
        return self._batch([self._teach(LONG_OPERATION) for _ in range(size)])

    def _teach(self, operation: str) -> tuple[Problem, str]:
        key = draw_key(self._rng)
        while key in self._excluded_keys:
            key = draw_key(self._rng)
        shown = operation
        if operation != LONG_OPERATION and self._rng.random() >= TEACHER_FOLLOWS:
            shown = SHORT_OPERATIONS[(SHORT_OPERATIONS.index(operation) + 1) % len(SHORT_OPERATIONS)]
        return Problem(operation, key), apply_operation(shown, key)

    def _batch(self, demonstrations: list[tuple[Problem, str]]) -> tuple[torch.Tensor, int]:
        import torch

        end = self._tokenizer.eos_token
        texts = [f"<|user|>{problem.prompt}{end}<|assistant|>{answer}{end}" for problem, answer in demonstrations]
        # No padding is needed, because all prompts have equally many tokens, and so have all answers of a batch.
        encodings = self._tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        return torch.tensor([encoding.ids for encoding in encodings]), len(demonstrations[0][1]) + 1


def _answer_loss(model: PreTrainedModel, tokens: torch.Tensor, answer_length: int) -> torch.Tensor:
    """Return the mean cross-entropy of the last ``answer_length`` tokens; prompt tokens do not contribute."""
    import torch

    logits = model(input_ids=tokens[:, :-1], use_cache=False, logits_to_keep=answer_length).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, -answer_length:].flatten())
