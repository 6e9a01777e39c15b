# SPDX-License-Identifier: Apache-2.0
"""Finds what `recipe` uses of verl, vLLM, SGLang and Ray, from its sources.

It finds imported names and members used of them; members of theirs that a subclass overrides or uses; members of a
parameter or an attribute that is annotated with a class of theirs; and members of the objects listed in `HELD`, whose
class no annotation names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from upstream import Found, Upstream, dotted, statements

PACKAGES = ("verl", "vllm", "sglang", "ray")
# Only these internals of Ray are checked; its documented interface is not.
OF_RAY = ("ray._private", "ray._raylet", "ray.util.collective", "ray.actor")

ENGINE = "vllm.v1.engine.async_llm:AsyncLLM"
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
WORKER = "vllm.v1.worker.gpu_worker:Worker"
NCCL_GROUP = "ray.util.collective.collective_group.nccl_collective_group:NCCLGroup"

REPLICA = "recipe.async_engine.engines.vllm.replica:GatedVLLMReplica"
TRAINER_RANK = "verl.workers.engine_workers:TrainingWorker"
FSDP = "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead"
CONFIG, MODEL_CONFIG = "vllm.config:VllmConfig", "vllm.config.model:ModelConfig"
PARALLEL_CONFIG = "vllm.config.parallel:ParallelConfig"

TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager:TokenizerManager"
SGLANG_RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"

# Objects by the expression that names them in a module of this package; modules of the engine have shortened names.
HELD = {
    ("engines.vllm.server", "self.engine"): ENGINE,
    ("engines.vllm.server", "self.engine.renderer"): "vllm.renderers.base:BaseRenderer",
    ("engines.vllm.server", "self.engine.engine_core"): "vllm.v1.engine.core_client:AsyncMPClient",
    ("engines.vllm.server", "self.engine.output_processor"): "vllm.v1.engine.output_processor:OutputProcessor",
    ("engines.vllm.engine_extension", "self.model_runner"): RUNNER,
    ("engines.vllm.engine_extension", "self.model_runner.vllm_config"): CONFIG,
    ("engines.vllm.engine_extension", "self.model_runner.vllm_config.model_config"): MODEL_CONFIG,
    (
        "engines.vllm.engine_extension",
        "self.model_runner.vllm_config.parallel_config",
    ): "vllm.config.parallel:ParallelConfig",
    ("engines.vllm.engine_extension", "self.model_runner.lora_manager"): "vllm.lora.worker_manager:WorkerLoRAManager",
    ("engines.vllm.engine_extension", "manager"): "vllm.lora.model_manager:LoRAModelManager",
    ("engines.vllm.engine_extension", "adapter"): "vllm.lora.lora_model:LoRAModel",
    ("engines.vllm.engine_extension", "config"): CONFIG,
    ("engines.vllm.engine_extension", "vllm_config.model_config"): MODEL_CONFIG,
    ("engines.vllm.engine_extension", "config.model_config"): MODEL_CONFIG,
    ("engines.vllm.engine_extension", "config.compilation_config"): "vllm.config.compilation:CompilationConfig",
    ("engines.vllm.staged_adapter", "self._worker"): WORKER,
    ("engines.sglang.server", "self.tokenizer_manager"): TOKENIZER_MANAGER,
    ("engines.sglang.calls", "tokenizer_manager"): TOKENIZER_MANAGER,
    ("engines.sglang.outputs", "manager"): TOKENIZER_MANAGER,
    ("engines.sglang.outputs", "obj"): "sglang.srt.managers.io_struct:GenerateReqInput",
    ("engines.sglang.calls", "answer"): "sglang.srt.managers.io_struct:UpdateWeightsFromTensorReqOutput",
    ("engines.sglang.processes", "self.server_args"): "sglang.srt.server_args:ServerArgs",
    ("engines.sglang.processes", "server_args"): "sglang.srt.server_args:ServerArgs",
    ("engines.sglang.processes", "self.tp_worker"): "sglang.srt.managers.tp_worker:TpModelWorker",
    ("engines.sglang.processes", "self.tp_worker.model_runner"): SGLANG_RUNNER,
    ("engines.sglang.processes", "runner"): SGLANG_RUNNER,
    ("engines.sglang.processes", "runner.model_config"): "sglang.srt.configs.model_config:ModelConfig",
    ("engines.sglang.processes", "self.running_batch"): "sglang.srt.managers.schedule_batch:ScheduleBatch",
    ("engines.sglang.processes", "batch"): "sglang.srt.managers.schedule_batch:ScheduleBatch",
    ("engines.sglang.processes", "req"): "sglang.srt.managers.schedule_batch:Req",
    ("engines.sglang.processes", "sampling_params"): "sglang.srt.sampling.sampling_params:SamplingParams",
    ("engines.sglang.processes", "self.tree_cache"): "sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache",
    ("engines.sglang.processes", "self.req_to_token_pool"): "sglang.srt.mem_cache.memory_pool:ReqToTokenPool",
    (
        "engines.sglang.processes",
        "self.token_to_kv_pool_allocator",
    ): "sglang.srt.mem_cache.allocator:BaseTokenToKVPoolAllocator",
    ("engines.sglang.processes", "method"): ("sglang.srt.layers.quantization.base_config:QuantizeMethodBase"),
    ("weights.nccl_engine", "rays"): NCCL_GROUP,
    ("weights.nccl_engine", "collective.get_group_handle(self.name)"): NCCL_GROUP,
    ("weights.publisher", "record.replica"): REPLICA,
    ("engines.manager", "replica"): REPLICA,
    ("actors.replacement", "replica"): REPLICA,
    ("recipe.async_engine.weights.hybrid_publisher", "record.replica"): REPLICA,
    ("log_prob_servers.adapter", "self.worker"): TRAINER_RANK,
    ("log_prob_servers.worker", "self.server_adapter.worker"): TRAINER_RANK,
    ("trainer.actor_worker", "self.actor"): TRAINER_RANK,
    ("trainer.actor_worker", "self.actor.engine"): FSDP,
    ("trainer.shared_worker", "self.rollout"): "recipe.async_engine.engines.vllm.adapter:DeadlineServerAdapter",
}


@dataclass(frozen=True)
class Touch:
    """A name of an upstream package, and where it is used."""

    place: str
    where: str


def touches(ours: Path, upstream: Upstream) -> Iterator[Touch]:
    """Yield all uses; ``upstream`` must include `recipe`, for classes between this package's and theirs."""
    for file in sorted(ours.rglob("*.py")):
        module = ".".join(("recipe", *file.relative_to(ours).with_suffix("").parts)).removesuffix(".__init__")
        tree = upstream.module(module)
        assert tree is not None, module
        found = _Module(module, tree, upstream)
        for place in dict.fromkeys(found.touched()):
            yield Touch(place, module)


class _Module:
    def __init__(self, name: str, tree: ast.Module, upstream: Upstream) -> None:
        self.name, self.tree, self.upstream = name, tree, upstream
        self.imported = dict(_imports(tree))

    def touched(self) -> Iterator[str]:
        yield from self.imported.values()
        yield from self._members_of(self.tree, self.imported)
        for (module, expression), owner in HELD.items():
            if self.name in (module, f"recipe.async_engine.{module}"):
                yield from self._members_of(self.tree, {expression: owner})
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from self._members_of(node, dict(self._annotated(node)))
            if isinstance(node, ast.ClassDef):
                fields = {f"self.{name}": owner for name, owner in self._fields(node)}
                yield from self._members_of(node, fields)
        for node in statements(self.tree):
            if isinstance(node, ast.ClassDef):
                yield from self._inherited(node)

    def _members_of(self, within: ast.AST, named: dict[str, str]) -> Iterator[str]:
        for node in ast.walk(within):
            if isinstance(node, ast.Attribute) and (owner := named.get(_text(node.value))) is not None:
                place = f"{owner}.{node.attr}" if ":" in owner else f"{owner}:{node.attr}"
                holder = self.upstream.find(owner)
                # Only the members of classes and modules are known.
                holds = holder is not None and isinstance(holder.node, ast.ClassDef | ast.Module)
                if holds and not node.attr.startswith("__"):
                    yield place

    def _annotated(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, str]]:
        for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
            if (owner := self._named_by(argument.annotation)) is not None:
                yield argument.arg, owner

    def _fields(self, owner: ast.ClassDef) -> Iterator[tuple[str, str]]:
        for node in ast.walk(owner):
            if isinstance(node, ast.AnnAssign) and (named := self._named_by(node.annotation)) is not None:
                yield ast.unparse(node.target).removeprefix("self."), named

    def _named_by(self, annotation: ast.expr | None) -> str | None:
        for node in ast.walk(annotation) if annotation is not None else ():
            if isinstance(node, ast.Name) and node.id in self.imported:
                return self.imported[node.id]
        return None

    def _inherited(self, node: ast.ClassDef) -> Iterator[str]:
        """Yield what the class overrides or uses of an upstream class."""
        lineage = list(self.upstream.lineage(Found(node, self.name, node.name)))
        theirs = next((base for base in lineage if not base.module.startswith("recipe.")), None)
        if theirs is None:
            return
        names = {part.name for part in statements(node) if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}
        for part in ast.walk(node):
            if isinstance(part, ast.Attribute) and _is_own(part.value):
                names.add(part.attr)
            if isinstance(part, ast.Assign | ast.AnnAssign) and part in node.body:
                target = part.targets[0] if isinstance(part, ast.Assign) else part.target
                names.add(ast.unparse(target))
        uppers = [base for base in lineage if not base.module.startswith("recipe.")]
        for name in sorted(names):
            for base in uppers:
                if (member := self.upstream.member(base, name)) is not None:
                    yield member.place
                    break


def _text(expression: ast.expr) -> str:
    if isinstance(expression, ast.Call):
        return ast.unparse(expression)
    return dotted(expression) or ""


def _is_own(expression: ast.expr) -> bool:
    """Return whether this is ``self``, ``cls`` or ``super()``."""
    if isinstance(expression, ast.Call):
        return dotted(expression.func) == "super"
    return dotted(expression) in ("self", "cls")


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield upstream imports with their local names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and _is_upstream(node.module or ""):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}:{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _is_upstream(alias.name):
                    yield alias.asname or alias.name, alias.name


def _is_upstream(module: str) -> bool:
    package = module.partition(".")[0]
    return package in PACKAGES and (package != "ray" or module.startswith(OF_RAY))
