# SPDX-License-Identifier: Apache-2.0
"""Packages that verl's engines import where they run, and that an installation may lack.

Contract: `needs` names each package that a run on accelerators imports, with the settings that ask for it. A run on a
CPU needs only what this package installs. Which packages are missing is found by `inspection/check.py` on this machine,
and by `inspection/nodes.py` on the nodes of a cluster. Shown by tests/config/test_packages.py.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from recipe.async_engine.config.plan import has_critic
from recipe.async_engine.config.problems import lookup, render

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
ATTENTION = f"{MODEL}.override_config.attn_implementation"
BACKEND = "actor_rollout_ref.rollout.checkpoint_engine.backend"
SEE = "see docs/dependencies.md"
OTHERS = ("torchtitan", "veomni")
"""The training engines whose packages have the same names."""
MODULES = ("flash_attn", "kernels", "mbridge", "megatron.bridge", "cupy", "nixl", "liger_kernel", *OTHERS)
"""All modules that `needs` may name."""


@dataclass(frozen=True, slots=True)
class Need:
    """A package that a setting asks for.

    Attributes:
        modules: the package is there if any of these modules is.
        setting: the setting that asks for it.
        allowed: the values of the setting that do not.
        instead: what to change if it is missing; empty if there is no other way.
    """

    package: str
    modules: tuple[str, ...]
    setting: str
    allowed: str
    instead: str = ""

    def is_lacking(self, absent: Collection[str]) -> bool:
        """Return whether the package is missing where the modules ``absent`` are."""
        return all(module in absent for module in self.modules)

    @property
    def advice(self) -> str:
        """What to do if the package is missing."""
        return f"Install {self.package} ({SEE}){f', or {self.instead}' if self.instead else ''}."


def needs(config: Mapping[str, Any]) -> Iterator[Need]:
    """Yield the packages that a run needs; none if it is on a CPU."""
    if lookup(config, "trainer.device") == "cpu":
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
        yield Need("cupy", ("cupy",), BACKEND, "recipe_gloo without cupy", "take recipe_gloo, with its module")
    if backend == "nixl":
        yield Need("nixl", ("nixl",), BACKEND, "nccl without nixl", "set it to nccl")


def attention(config: Mapping[str, Any], model: str = MODEL) -> str:
    """Return how FSDP's engines compute attention: as set, else verl's choice (verl/workers/config/model.py:185)."""
    places = (f"{model}.override_config{part}.attn_implementation" for part in (".model_config", ""))
    return next((str(said) for place in places if (said := lookup(config, place))), "flash_attention_2")


def _of_fsdp(config: Mapping[str, Any]) -> Iterator[Need]:
    """Yield the packages that FSDP's engines need."""
    # Transformers can take the kernel from its hub instead, with the package `kernels`.
    if attention(config).startswith("flash_attention"):
        modules = ("flash_attn", "kernels")
        yield Need("flash-attn", modules, ATTENTION, "sdpa without flash-attn", f"set +{ATTENTION}=sdpa")
    if lookup(config, f"{MODEL}.use_liger"):
        yield Need("liger-kernel", ("liger_kernel",), f"{MODEL}.use_liger", "false without liger-kernel", "remove it")
