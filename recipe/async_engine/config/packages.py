# SPDX-License-Identifier: Apache-2.0
"""Determines which optional packages of verl's engines a run needs.

Contract: `needs` yields each optional package that a run imports, with the setting that requires it. A run on a CPU
needs none but SGLang, if that is its rollout engine. `inspection/check.py` looks for missing packages on this machine,
and `inspection/nodes.py` on the nodes of a cluster. Shown by tests/config/test_packages.py.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from recipe.async_engine.config.plan import has_critic
from recipe.async_engine.config.problems import lookup, render

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
ATTENTION = f"{MODEL}.override_config.attn_implementation"
BACKEND = "actor_rollout_ref.rollout.checkpoint_engine.backend"
ENGINE = "actor_rollout_ref.rollout.name"
SEE = "see docs/dependencies.md"
OTHERS = ("torchtitan", "veomni")
"""The training engines that are implemented in a package of the same name."""
SGLANG = "sglang==0.5.12"
"""The release that verl pins. Later ones differ in what this package extends (tests/contracts/sglang.toml)."""
MODULES = ("flash_attn", "kernels", "mbridge", "megatron.bridge", "cupy", "nixl", "liger_kernel", SGLANG, *OTHERS)
"""All modules that `needs` may name."""


@dataclass(frozen=True, slots=True)
class Need:
    """A package that the value of a setting requires.

    Attributes:
        modules: importable names, or one release as ``a==1.2``; the package counts as installed if any is found.
        setting: the setting whose value requires the package.
        allowed: the values of the setting that work without the package, in words.
        instead: what to change if the package is missing; empty if it can only be installed.
        how: how to install the package; empty if pip alone installs it.
    """

    package: str
    modules: tuple[str, ...]
    setting: str
    allowed: str
    instead: str = ""
    how: str = ""

    def is_lacking(self, absent: Collection[str]) -> bool:
        """Return whether the package is missing on a machine that lacks the modules ``absent``."""
        return all(module in absent for module in self.modules)

    @property
    def advice(self) -> str:
        """A sentence that says what to do if the package is missing."""
        how = f" by {self.how}" if self.how else ""
        return f"Install {self.package}{how} ({SEE}){f', or {self.instead}' if self.instead else ''}."


def needs(config: Mapping[str, Any]) -> Iterator[Need]:
    """Yield the optional packages that a run needs; a run on a CPU needs none but SGLang."""
    on_cpu = lookup(config, "trainer.device") == "cpu"
    if lookup(config, ENGINE) == "sglang":
        how = "`make setup`" if on_cpu else "`uv pip install -e '.[sglang]'` with an override"
        yield Need("SGLang 0.5.12", (SGLANG,), ENGINE, "vllm without SGLang 0.5.12", "set it to vllm", how)
    if on_cpu:
        return
    sections = (ACTOR, "critic") if has_critic(config) else (ACTOR,)
    strategies = {section: lookup(config, f"{section}.strategy") for section in sections}
    servers = lookup(config, "model_engine_server.backend")
    if "fsdp2" in (servers, *strategies.values()) or "fsdp" in strategies.values():
        yield from _of_fsdp(config)
    on_megatron = [section for section, strategy in strategies.items() if strategy == "megatron"]
    megatron = {f"{section}.strategy": f"{section}.megatron" for section in on_megatron}
    if servers == "megatron":
        megatron["model_engine_server.backend"] = "model_engine_server.engine"
    for setting, engine in megatron.items():
        yield Need("flash-attn", ("flash_attn",), setting, "fsdp2 without flash-attn")
        legacy = bool(lookup(config, f"{engine}.vanilla_mbridge"))
        package, module = ("mbridge", "mbridge") if legacy else ("megatron-bridge", "megatron.bridge")
        yield Need(package, (module,), f"{engine}.vanilla_mbridge", f"{render(not legacy)} without {package}")
    for section, strategy in strategies.items():
        if strategy in OTHERS:
            yield Need(str(strategy), (str(strategy),), f"{section}.strategy", f"fsdp2 without {strategy}")
    backend = lookup(config, BACKEND)
    if backend in ("nccl", "nixl"):
        yield Need("cupy", ("cupy",), BACKEND, "recipe_gloo without cupy", "set recipe_gloo, with its module")
    if backend == "nixl":
        yield Need("nixl", ("nixl",), BACKEND, "nccl without nixl", "set it to nccl")


def attention(config: Mapping[str, Any], model: str = MODEL) -> str:
    """Return the attention implementation of FSDP engines, or verl's default (verl/workers/config/model.py:185)."""
    places = (f"{model}.override_config{part}.attn_implementation" for part in (".model_config", ""))
    return next((str(said) for place in places if (said := lookup(config, place))), "flash_attention_2")


def _of_fsdp(config: Mapping[str, Any]) -> Iterator[Need]:
    # The package `kernels` is enough: with it, Transformers loads flash attention from the Hugging Face hub.
    if attention(config).startswith("flash_attention"):
        modules = ("flash_attn", "kernels")
        yield Need("flash-attn", modules, ATTENTION, "sdpa without flash-attn", f"set +{ATTENTION}=sdpa")
    if lookup(config, f"{MODEL}.use_liger"):
        yield Need("liger-kernel", ("liger_kernel",), f"{MODEL}.use_liger", "false without liger-kernel", "remove it")
