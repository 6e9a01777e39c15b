# SPDX-License-Identifier: Apache-2.0
"""Makes vLLM continue an interrupted answer in the same way as a request that vLLM has preempted.

The tokens that were sampled before the interruption are called the earlier tokens here. The request for the remainder
of the answer carries them separately from its prompt (`core/cuts.py`). Each process of an engine treats the earlier
tokens as output of the new request: the scheduler for grammars (`scheduler`), the workers for penalties, logits
processors, thinking budgets and random generators (`patch_worker`), and the server's detokenizer for stop strings
(`patch_output_processor`). The engine returns only the remainder.

The vLLM classes and functions that this module relies on are listed in tests/contracts/vllm.toml.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.sample.ops.topk_topp_sampler import empty_exponential_noise_like
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from recipe.async_engine.core.cuts import sampled_before

SCHEDULER = f"{__name__}.scheduler"
"""Import path of `scheduler`, for the engine argument ``scheduler_cls``."""


def scheduler(vllm_config: VllmConfig, **arguments: Any) -> SchedulerInterface:
    """Return the scheduler that vLLM would have chosen, extended to continue interrupted answers."""
    vllm_config.scheduler_config.scheduler_cls = None
    chosen: Any = vllm_config.scheduler_config.get_scheduler_cls()

    class ContinuingScheduler(chosen):
        """Adds the tokens sampled before an interruption to a new request, before it is scheduled."""

        def add_request(self, request: Any) -> None:
            if request.request_id not in self.requests:
                continue_answer(request, self.structured_output_manager)
            super().add_request(request)

    return ContinuingScheduler(vllm_config=vllm_config, **arguments)


def continue_answer(request: Any, grammars: StructuredOutputManager) -> None:
    """Add the tokens sampled before an interruption to a new request's output, and advance its grammar over them."""
    before = sampled_before(request.sampling_params)
    if not before:
        return
    request.append_output_token_ids(before)
    # Drop these statistics. vLLM fails if they count more cached tokens than the prompt has. They could, because the
    # tokens sampled before the interruption may be cached too.
    request.prefill_stats = None
    if request.use_structured_output:
        wanted = request.structured_output_request
        wanted.grammar = grammars.executor.submit(_advanced, request, wanted._grammar, grammars)


def _advanced(request: Any, compiled: Any, grammars: StructuredOutputManager) -> Any:
    """Return a request's compiled grammar, advanced over the tokens that were sampled before the interruption.

    Raises:
        ValueError: the grammar rejects one of these tokens.
    """
    grammar = compiled.result() if isinstance(compiled, Future) else compiled
    ruled = _after_reasoning(request, grammars)
    if ruled and not grammar.accept_tokens(request.request_id, ruled):
        raise ValueError(f"the grammar of request {request.request_id} does not accept the tokens sampled earlier")
    return grammar


def _after_reasoning(request: Any, grammars: StructuredOutputManager) -> list[int]:
    """Return the tokens from before the interruption that the request's grammar has to accept.

    If the grammar does not apply to the reasoning, the tokens up to the end of the reasoning are left out.
    """
    before, wanted = sampled_before(request.sampling_params), request.structured_output_request
    if grammars.reasoner_cls is None or grammars.enable_in_reasoning:
        return before
    reasoner, context = grammars._get_reasoner(request), list(request.prompt_token_ids)
    if wanted.reasoning_ended is None:
        wanted.reasoning_ended = reasoner.is_reasoning_end(context)
    if wanted.reasoning_ended:
        return before
    for count, token in enumerate(before, 1):
        context.append(token)
        if reasoner.is_reasoning_end_streaming(context, [token]):
            wanted.reasoning_ended = True
            return before[count:]
    return []


def patch_worker(vllm_config: VllmConfig) -> None:
    """Patch vLLM's model runner in this process to continue interrupted answers. A second call does no harm."""
    model, drawn_in_64_bit = vllm_config.model_config, vllm_config.model_config.use_fp64_gumbel
    vocabulary = model.get_vocab_size()

    class ContinuedState(CachedRequestState):
        """The model runner's state of a request, whose output begins with the tokens from before an interruption."""

        def __post_init__(self) -> None:
            super().__post_init__()
            before = sampled_before(self.sampling_params)
            self.output_token_ids: list[int] = list(before)
            if before and self.generator is not None:
                # Draw as many random numbers as were drawn when the tokens in ``before`` were sampled.
                logits = torch.empty(vocabulary, dtype=torch.float32, device=self.generator.device)
                noise = empty_exponential_noise_like(logits, drawn_in_64_bit)
                for _ in before:
                    noise.exponential_(generator=self.generator)

    gpu_model_runner.CachedRequestState = ContinuedState
    if not hasattr(ThinkingBudgetStateHolder.sync_batch, "__wrapped__"):
        ThinkingBudgetStateHolder.sync_batch = _replaying(ThinkingBudgetStateHolder.sync_batch)


def _replaying(sync_batch: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``sync_batch``, which counts thinking tokens, for requests that continue an interrupted answer.

    The wrapper processes the tokens from before the interruption one by one. vLLM would process them all at once, like
    the tokens of a preempted request, and miscount thinking tokens.
    """

    @functools.wraps(sync_batch)
    def synced(self: Any, batch_update: Any) -> None:
        sync_batch(self, batch_update)
        # Identify requests by their token lists, because their indices in the batch may change.
        come = {id(tokens) for _, _, _, tokens in batch_update.added if tokens} if batch_update else set()
        for state in self._state.values():
            tokens = state["output_tok_ids"]
            if id(tokens) in come:
                for count in range(len(tokens)):
                    state["output_tok_ids"], state["force_index"] = tokens[:count], []
                    self._update_think_state(state)
                state["output_tok_ids"] = tokens

    return synced


def patch_output_processor(processor: Any) -> None:
    """Make a server's output processor find stop strings that begin in the text from before an interruption."""
    add_request = processor.add_request

    def added(request: Any, *args: Any, **kwargs: Any) -> None:
        add_request(request, *args, **kwargs)
        parameters = request.sampling_params
        before = sampled_before(parameters)
        if before and parameters.stop and parameters.detokenize:
            feed_tokens(processor.request_states[request.request_id].detokenizer, before)

    processor.add_request = added


def feed_tokens(detokenizer: Any, tokens: list[int]) -> None:
    """Let a new detokenizer process ``tokens`` before any others, so that it returns only the text after them."""
    stop, detokenizer.stop = detokenizer.stop, []
    detokenizer.update(tokens, False)
    detokenizer.stop = stop
    detokenizer.min_tokens = max(0, detokenizer.min_tokens - len(tokens))
    if hasattr(detokenizer, "prompt_len"):
        # vLLM's slow detokenizer (for Python tokenizers) keeps the prompt and the answer in one list of tokens, so
        # count ``tokens`` as a part of the prompt.
        detokenizer.prompt_len += len(tokens)
    else:
        detokenizer.token_ids.clear()
