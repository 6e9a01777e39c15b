# SPDX-License-Identifier: Apache-2.0
"""The code of an SGLang engine's processes: SGLang's own scheduler, extended by a staging area for weights.

Contract: weights arrive on a thread while the engine generates, and are staged as
`recipe.async_engine.engines.staged_model` describes. A call from the server (`calls`) is executed between two steps of
the engine. An interrupted answer is continued in the same way as a request that SGLang has retracted.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from sglang.srt.managers import detokenizer_manager, mm_utils
from sglang.srt.managers import scheduler as sglang_scheduler
from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput, UpdateWeightsFromTensorReqOutput
from sglang.srt.model_loader.loader import _initialize_model
from sglang.srt.model_loader.utils import set_default_torch_dtype
from torch import nn

from recipe.async_engine.core.cuts import SAMPLED
from recipe.async_engine.engines.sglang.calls import CALL
from recipe.async_engine.engines.sglang.penalties import count_earlier_tokens
from recipe.async_engine.engines.staged_model import LOADED_IN_PLACE_ONLY, LiveModel, StagedModel, pin, wide_parameters
from recipe.async_engine.engines.weight_stream import StagingWorker
from recipe.async_engine.weights.staged import StagingRefused

MOST_ENDED = 1000
"""Number of ended requests that a scheduler remembers: more than can be on their way to the server at once."""

AFTER_AN_ERROR = 1
"""Exit status of an engine's process whose loop has ended, which happens only after an error.

SGLang signals the parent of the process, and by itself would let the process exit with status 0. But the parent of a
forked process is not the server. So the server watches exit statuses, and ends itself if one is not 0.
"""


class StagingScheduler(StagingWorker, sglang_scheduler.Scheduler):
    """SGLang's scheduler, which holds a staging area for the next weights and continues interrupted answers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._ended: dict[str, int] = {}
        """Number of tokens sampled for each request that ended since the last swap (the latest `MOST_ENDED`)."""
        super().__init__(*args, **kwargs)

    def update_weights_from_tensor(self, recv_req: UpdateWeightsFromTensorReqInput) -> UpdateWeightsFromTensorReqOutput:
        """Execute a call from the server (`calls`), or update weights as SGLang does."""
        if recv_req.load_format != CALL:
            return super().update_weights_from_tensor(recv_req)
        method, *args = json.loads(recv_req.serialized_named_tensors[0])
        try:
            outcome = (True, getattr(self, method)(*args))
        except Exception as error:  # Any error is the outcome of this call; without this, SGLang would end the engine.
            outcome = (False, f"{type(error).__name__}: {error}")
        outcomes: list[Any] = [None] * self.tp_size
        torch.distributed.all_gather_object(outcomes, outcome, group=self.tp_cpu_group)
        wrong = [text for succeeded, text in outcomes if not succeeded]
        if wrong:
            return UpdateWeightsFromTensorReqOutput(success=False, message=wrong[0])
        results = json.dumps([result for _, result in outcomes])
        return UpdateWeightsFromTensorReqOutput(success=True, message=results)

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        before = sampled_before(req.sampling_params)
        if before and not req.output_ids:
            continue_answer(req, before)
        extend_positions(req)
        if req.output_ids and req.logprob_start_len == len(req.origin_input_ids):
            # Otherwise SGLang would compute the log-probs of the answer's earlier tokens again, which nothing uses.
            req.logprob_start_len = -1
        super()._add_request_to_queue(req, is_retracted)

    def stream_output(self, reqs: list[Any], *args: Any, **kwargs: Any) -> None:
        super().stream_output(reqs, *args, **kwargs)
        self._ended.update({req.rid: sampled_here(req) for req in reqs if req.finished()})
        while len(self._ended) > MOST_ENDED:
            del self._ended[next(iter(self._ended))]

    @property
    def _model(self) -> nn.Module:
        model: nn.Module = self.tp_worker.model_runner.model
        return model

    def wide_parameters(self) -> list[str]:
        return wide_parameters(self._model, self.tp_worker.model_runner.model_config.dtype)

    def begin_staging(self, version: int, use_shm: bool, timeout_s: float, in_host: bool, handle: str) -> None:
        """Start to receive the next stream of weights as ``version``, next to the live weights.

        Args:
            use_shm: whether the sender uses shared memory instead of CUDA IPC.
            timeout_s: seconds without a message after which the stream fails.
            in_host: whether the weights are staged in host memory instead of on the device.
            handle: the sender's address, with the placeholder ``{rank}`` for the number of this process on its node.

        Raises:
            StagingRefused: weights of this engine cannot be staged, or an earlier stream does not end.
        """
        self._end_stream(timeout_s)
        if self._staged_model is None:
            self._staged_model = self._staging_area(in_host)
        self._receive(self._staged_model, version, *self._meeting_point(handle), use_shm, timeout_s)

    def begin_loading(self, version: int, use_shm: bool, timeout_s: float, handle: str) -> None:
        """Start to receive a stream of weights like `begin_staging`, but load it over the live weights."""
        self._end_stream(timeout_s)
        live = LiveModel(self._model, self._finish)
        self._receive(live, version, *self._meeting_point(handle), use_shm, timeout_s)

    def _meeting_point(self, handle: str) -> tuple[str, torch.device]:
        """Return the address of this process's stream, and the device to which the stream goes."""
        on_a_node = self.tp_size // self.server_args.nnodes
        device = torch.device(self.device) if self.device == "cpu" else torch.device(self.device, self.gpu_id)
        return handle.format(rank=self.tp_rank % on_a_node), device

    def _staging_area(self, in_host: bool) -> StagedModel:
        runner = self.tp_worker.model_runner
        if runner.model_config.quantization is not None or self.draft_worker is not None:
            raise StagingRefused(LOADED_IN_PLACE_ONLY)
        # Leave inference mode, because tensors created in it cannot be written to outside of it.
        with (
            torch.inference_mode(False),
            set_default_torch_dtype(runner.model_config.dtype),
            torch.device("cpu" if in_host else self.device),
        ):
            spare = _initialize_model(runner.model_config, runner.load_config, None).eval()
        if in_host and self.device != "cpu":
            pin(spare)
        return StagedModel(self._model, spare, self._finish, in_host=in_host)

    @staticmethod
    def _finish(model: nn.Module) -> None:
        """Compute the values that SGLang's loader derives from loaded weights (model_loader/loader.py:735)."""
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if method is not None:
                method.process_weights_after_loading(module)

    def swap_staged(self, version: int) -> dict[str, int]:
        """Make the staged weights the live ones.

        Returns:
            The number of tokens that the old weights have sampled for each request, including requests that have ended
            but whose answers may not have reached the server. Answer tokens with which a request arrived, because it
            continues an interrupted answer, are not counted.

        Raises:
            StagingRefused: no complete weights of this version are staged.
        """
        self._make_live(version)
        ended, self._ended = self._ended, {}
        return ended | {req.rid: sampled_here(req) for req in [*self.waiting_queue, *self.running_batch.reqs]}

    def drop_computed(self, pause: bool) -> bool:
        """Drop KV cache and embeddings of images if no batch is being computed, and return whether they were dropped.

        With ``pause`` the engine then computes nothing until generation resumes, not even for an HTTP request that the
        server admitted before its pause and that reaches the engine only afterwards.

        SGLang's own method is not used, for two reasons. It refuses while requests wait, even if they are retracted and
        hold no part of the cache. And it keeps the embeddings that old weights computed for images, so later requests
        with the same images would use these.
        """
        batches = (self.running_batch, self.last_batch, self.cur_batch)
        if self.chunked_req is not None or any(batch is not None and not batch.is_empty() for batch in batches):
            return False
        self.tree_cache.reset()
        self.req_to_token_pool.clear()
        self.token_to_kv_pool_allocator.clear()
        mm_utils.embedding_cache.clear()
        self._engine_paused |= pause
        return True


def sampled_before(sampling_params: Any) -> list[int]:
    """Return the tokens that a continued answer had before its interruption, or [] for a new answer."""
    before: list[int] = (sampling_params.custom_params or {}).get(SAMPLED, [])
    return before


def sampled_here(req: Any) -> int:
    """Return how many tokens this engine has sampled for a request, without those that came with the request."""
    return len(req.output_ids) - len(sampled_before(req.sampling_params))


def continue_answer(req: Any, before: list[int]) -> None:
    """Give a new request the tokens ``before`` that its answer has already; SGLang returns only the later tokens."""
    count = len(before)
    req.output_ids = list(before)
    req.send_token_offset = req.send_output_token_logprobs_offset = count
    if req.return_logprob:
        # Placeholders, which are never sent.
        req.output_token_logprobs_val, req.output_token_logprobs_idx = [0.0] * count, [0] * count
        req.output_top_logprobs_val, req.output_top_logprobs_idx = [None] * count, [None] * count
        req.output_token_ids_logprobs_val, req.output_token_ids_logprobs_idx = [None] * count, [None] * count


def extend_positions(req: Any) -> None:
    """Add the positions of a request's answer to those of its prompt with images (M-RoPE).

    Without this, a request that comes back with a part of its answer would have too few positions, which ends SGLang's
    scheduler (model_executor/forward_batch_info.py:811).
    """
    seen = req.multimodal_inputs
    if seen is None or seen.mrope_positions is None:
        return
    known, all_tokens = seen.mrope_positions.shape[1], len(req.origin_input_ids) + len(req.output_ids)
    if all_tokens > known:
        later = torch.arange(known, all_tokens) + seen.mrope_position_delta.flatten().cpu()
        positions = later.expand(3, -1).to(seen.mrope_positions)
        seen.mrope_positions = torch.cat([seen.mrope_positions, positions], dim=1)


def run_scheduler(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """Run SGLang's scheduler process with a `StagingScheduler`."""
    if server_args.device == "cpu" and server_args.tp_size > 1:
        # Otherwise SGLang would ask for a NUMA node for each process of the engine.
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(map(str, range(server_args.tp_size))))
    sglang_scheduler.Scheduler = StagingScheduler
    count_earlier_tokens()
    sglang_scheduler.run_scheduler_process(server_args, *args, **kwargs)
    sys.exit(AFTER_AN_ERROR)


def run_detokenizer(*args: Any, **kwargs: Any) -> None:
    """Run SGLang's detokenizer process. Importing this function has loaded this package's plugin in the process."""
    detokenizer_manager.run_detokenizer_process(*args, **kwargs)
    sys.exit(AFTER_AN_ERROR)
