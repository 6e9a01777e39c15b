# SPDX-License-Identifier: Apache-2.0
"""Computes the memory of one rank of a training engine, from a model's shape and the engine's parallel sizes.

Contract: weights, gradients and optimizer state are counted as the engines store them. FSDP2 shards weights, gradients
and Adam's moments in fp32 over its ranks, and computes with gathered layers in bf16. Megatron has bf16 weights, an fp32
gradient buffer and, sharded over d data-parallel ranks, fp32 weights and Adam's two moments: 6 + 12/d bytes per
parameter (Megatron-Core's guide, "Distributed Optimizer"). docs/memory.md compares the results with published and
measured figures.
"""

from dataclasses import dataclass

from recipe.plan.memory.items import GIB, Item, listed
from recipe.plan.memory.shape import ModelShape

# Memory that each process needs for CUDA's context, NCCL's buffers and libraries.
CONTEXT = Item("context, NCCL, libraries", GIB, certain=False)
FP32 = 4


@dataclass(frozen=True, slots=True)
class Work:
    """The largest micro-batch of a rank.

    Attributes:
        tokens: number of tokens of the micro-batch on this rank.
        logit_bytes: bytes per logit, summed over the copies that are stored (in bf16 and fp32, for example); 0 with
            fused kernels or a value model.
        recomputes: whether gradient checkpointing is used, which keeps only the inputs of layers.
    """

    tokens: int
    logit_bytes: int
    recomputes: bool = True


@dataclass(frozen=True, slots=True)
class Rank:
    """The memory of one rank.

    Attributes:
        weights, gradients, optimizer: bytes of the rank's weights, gradients and optimizer state during an update.
        update: further memory at the peak of an update.
        forward: further memory at the peak of a forward pass without a backward pass.
        weights_rest, optimizer_rest: whether weights, or optimizer state, are in host memory while the rank is idle.
        keeps_gradients: whether the gradient buffer stays on the device while the rank is idle.
        on_host: whether weights, gradients and optimizer state are always in host memory.
    """

    weights: int
    gradients: int
    optimizer: int
    update: tuple[Item, ...]
    forward: tuple[Item, ...]
    weights_rest: bool = False
    optimizer_rest: bool = False
    keeps_gradients: bool = False
    on_host: bool = False

    @property
    def updating(self) -> tuple[Item, ...]:
        """Return the device memory during an update."""
        states = (Item("weights", self.weights), Item("gradients", self.gradients), Item("optimizer", self.optimizer))
        return (*(() if self.on_host else listed(*states)), *self.update)

    @property
    def scoring(self) -> tuple[Item, ...]:
        """Return the device memory during a forward pass without a backward pass."""
        weights = () if self.on_host or not self.weights_rest else (Item("weights", self.weights),)
        return (*weights, *self.at_rest, *self.forward)

    @property
    def at_rest(self) -> tuple[Item, ...]:
        """Return the device memory while the rank is idle."""
        if self.on_host:
            return ()
        buffer = self.keeps_gradients and not self.weights_rest
        return listed(
            None if self.weights_rest else Item("weights", self.weights),
            Item("gradients", self.gradients) if buffer else None,
            None if self.optimizer_rest else Item("optimizer", self.optimizer),
        )

    @property
    def host(self) -> tuple[Item, ...]:
        return listed(
            Item("weights", self.weights) if self.weights_rest or self.on_host else None,
            Item("gradients", self.gradients) if self.on_host else None,
            Item("optimizer", self.optimizer) if self.optimizer_rest or self.on_host else None,
        )


@dataclass(frozen=True, slots=True)
class FSDP:
    """How FSDP2 stores a model. `weights_rest`, `optimizer_rest` and `on_host` mean the same as in `Rank`.

    Attributes:
        shards: number of ranks that share one copy of the model (`fsdp_size`, or all ranks).
        model_bytes: bytes of a stored parameter (`model_dtype`).
        compute_bytes: bytes of a gathered parameter (`mixed_precision.param_dtype`).
        trained: number of trained parameters; None for all.
        trains: whether the model is trained.
        keeps_unsharded: whether gradients stay unsharded until the last micro-batch
            (`use_no_sync_for_gradient_accumulation`).
        reshards: whether a layer's gathered weights are freed after its forward pass.
    """

    shards: int
    model_bytes: int = FP32
    compute_bytes: int = 2
    trained: int | None = None
    trains: bool = True
    keeps_unsharded: bool = False
    reshards: bool = True
    weights_rest: bool = False
    optimizer_rest: bool = False
    on_host: bool = False


def fsdp_rank(shape: ModelShape, layout: FSDP, update: Work | None, forward: Work | None, head: bool = True) -> Rank:
    """Return the memory of an FSDP2 rank.

    ``head`` is whether the model has a language-model head; a critic has none.
    """
    parameters = shape.parameters if head else shape.without_head
    trained = 0 if not layout.trains else parameters if layout.trained is None else layout.trained
    outside = parameters - shape.layer_parameters - shape.expert_parameters
    share, trained_share = -(-parameters // layout.shards), -(-trained // layout.shards)
    # FSDP2 holds gathered weights on each rank: those of the current and the next layer, and all weights outside
    # layers.
    gathered = (outside + 2 * shape.largest_layer if layout.reshards else parameters) * layout.compute_bytes
    return Rank(
        weights=share * layout.model_bytes,
        gradients=trained_share * layout.model_bytes,
        optimizer=2 * trained_share * layout.model_bytes,
        update=() if update is None else _fsdp_update(shape, layout, update, gathered, outside, trained),
        forward=() if forward is None else _fsdp_forward(shape, forward, gathered),
        weights_rest=layout.weights_rest,
        optimizer_rest=layout.optimizer_rest,
        on_host=layout.on_host,
    )


def _fsdp_update(
    shape: ModelShape, layout: FSDP, work: Work, gathered: int, outside: int, trained: int
) -> tuple[Item, ...]:
    """Return the memory that an update needs at its peak in addition to weights, gradients and optimizer state.

    The peak is in one of two places. At the model's output, there are all logits and the gradients of the output head.
    In the backward pass of the largest layer, there are the gradients of the output head and of the layer (which are
    reduced over the ranks in fp32), and the layer's recomputed activations.
    """
    inputs = work.tokens * shape.hidden * 2 * shape.layers
    layer = work.tokens * layer_activations(shape)
    kept = inputs if work.recomputes else layer * shape.layers
    whole = FP32 * trained if layout.keeps_unsharded else 0
    of_output = min(outside, trained) * layout.compute_bytes
    of_layer = min(shape.largest_layer, trained) * (layout.compute_bytes + 2 * FP32)
    at_output = (kept + work.tokens * 16 * shape.hidden, of_output, work.tokens * shape.vocab * work.logit_bytes)
    in_layer = (kept + layer * work.recomputes, of_output + of_layer, 0)
    activations, gradients, logits = max(at_output, in_layer, key=sum)
    return listed(
        Item("activations", activations, certain=False),
        Item("logits", logits, certain=False),
        Item("gathered layers", gathered, certain=False),
        Item("gradients under way", gradients + whole, certain=False),
        CONTEXT,
    )


def _fsdp_forward(shape: ModelShape, work: Work, gathered: int) -> tuple[Item, ...]:
    return listed(
        Item("activations", work.tokens * _layer_peak(shape), certain=False),
        Item("logits", work.tokens * shape.vocab * work.logit_bytes, certain=False),
        Item("gathered layers", gathered, certain=False),
        CONTEXT,
    )


def layer_activations(shape: ModelShape) -> int:
    """Return the bytes per token that a transformers layer keeps for its backward pass, in bf16 with flash attention.

    Norms compute in fp32 and keep their input, its fp32 copy, the normalized and the scaled values. Attention keeps q,
    k, v and its output; norms of q and k add copies of these two. The MLP keeps the gate projection before and after
    its activation, the up projection, and the product.
    """
    width = shape.q_width + shape.kv_width
    norms = 2 * 12 * shape.hidden + (8 * width if shape.head_norms else 0)
    attention = 2 * (2 * shape.q_width + 2 * shape.kv_width) + 4 * width
    if shape.expert_layers:
        routed = shape.experts_per_token * (4 * shape.hidden + 8 * shape.expert_mlp)
        return norms + attention + max(routed, 8 * shape.mlp if shape.dense_layers else 0)
    return norms + attention + 8 * shape.mlp


def _layer_peak(shape: ModelShape) -> int:
    """Return the bytes per token that one layer needs at its peak in a forward pass without a backward pass."""
    mlp = shape.experts_per_token * shape.expert_mlp if shape.expert_layers else shape.mlp
    return 8 * shape.hidden + max(6 * mlp, 4 * (shape.q_width + shape.kv_width))


@dataclass(frozen=True, slots=True)
class Megatron:
    """How Megatron stores a model.

    The parallel sizes are those of verl's `megatron` section; `weights_rest` and `optimizer_rest` mean the same as in
    `Rank`.

    Attributes:
        ranks: number of all ranks of the engine.
        distributed: whether the optimizer state is sharded over the data-parallel ranks.
        trained: number of trained parameters; None for all.
        trains: whether the model is trained, not only used for forward passes.
    """

    ranks: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    distributed: bool = True
    trained: int | None = None
    trains: bool = True
    sequence_parallel: bool = True
    weights_rest: bool = False
    optimizer_rest: bool = False

    @property
    def copies(self) -> int:
        """Return the number of ranks that have the same dense parameters.

        A distributed optimizer (``distributed``) shards the state of these parameters over the ranks.
        """
        return max(1, self.ranks // (self.tensor * self.pipeline))

    @property
    def expert_copies(self) -> int:
        return max(1, self.ranks // (self.expert * self.expert_tensor * self.pipeline))


def megatron_rank(shape: ModelShape, layout: Megatron, update: Work | None, forward: Work | None) -> Rank:
    """Return the memory of a rank of the first or the last pipeline stage, whichever needs more."""
    stages = [_stage(shape, layout, update, forward, first=True)]
    if layout.pipeline > 1:
        stages.append(_stage(shape, layout, update, forward, first=False))
    return max(stages, key=lambda rank: sum(item.bytes for item in rank.updating))


def _stage(shape: ModelShape, layout: Megatron, update: Work | None, forward: Work | None, first: bool) -> Rank:
    dense, experts = _on_stage(shape, layout, first)
    only = layout.pipeline == 1
    trained = (dense, experts) if layout.trains else (0, 0)
    if layout.trained is not None:
        trained = layout.trained // (layout.tensor * layout.pipeline), 0
    sharers = (layout.copies, layout.expert_copies) if layout.distributed else (1, 1)
    # The first stage has as many micro-batches in flight as there are stages, and the last stage has only one.
    under_way = layout.pipeline if first else 1
    has_logits = only or not first
    return Rank(
        weights=2 * (dense + experts),
        gradients=FP32 * sum(trained),
        optimizer=sum(12 * count // ranks for count, ranks in zip(trained, sharers, strict=True)),
        update=() if update is None else _megatron_work(shape, layout, update, under_way, has_logits),
        forward=() if forward is None else _megatron_work(shape, layout, forward, 0, has_logits),
        weights_rest=layout.weights_rest,
        optimizer_rest=layout.optimizer_rest,
        keeps_gradients=True,
    )


def _on_stage(shape: ModelShape, layout: Megatron, first: bool) -> tuple[int, int]:
    """Return the numbers of dense and of expert parameters on a rank of the first pipeline stage, or else the last."""
    only = layout.pipeline == 1
    layers = -(-shape.layers // layout.pipeline) / shape.layers
    norms = 2 * shape.hidden + 2 * shape.head_dim * shape.head_norms
    replicated = shape.layers * norms + shape.expert_layers * shape.router
    split = shape.layer_parameters - replicated
    outside = shape.outside_layers if only else shape.embedding + shape.hidden * (not first)
    dense = int(layers * (split / layout.tensor + replicated)) + outside // layout.tensor
    return dense, int(layers * shape.expert_parameters / (layout.expert * layout.expert_tensor))


def _megatron_work(
    shape: ModelShape, layout: Megatron, work: Work, under_way: int, has_logits: bool
) -> tuple[Item, ...]:
    tokens = work.tokens // (layout.tensor if layout.sequence_parallel else 1)
    layer = work.tokens * _megatron_layer(shape) // layout.tensor
    layers = -(-shape.layers // layout.pipeline) * under_way
    kept = layers * tokens * shape.hidden * 2 + layer if work.recomputes else max(layers, 1) * layer
    logits = work.tokens * shape.vocab * work.logit_bytes // layout.tensor if has_logits else 0
    return listed(
        Item("activations", kept, certain=False),
        Item("logits", logits, certain=False),
        CONTEXT,
    )


def _megatron_layer(shape: ModelShape) -> int:
    """Return the bytes per token that a layer of Megatron keeps for its backward pass, without tensor parallelism.

    With flash attention and fused norms, these are: the inputs and outputs of both norms; q, k and v before and after
    rotary embedding; the output of attention; and, in the MLP, both halves of its first layer's output and their
    product. With experts, the input and the output of each expert to which a token is routed are added.
    """
    common = 8 * shape.hidden + 6 * (shape.q_width + shape.kv_width)
    if shape.expert_layers:
        return common + shape.experts_per_token * (4 * shape.hidden + 6 * shape.expert_mlp)
    return common + 6 * shape.mlp
