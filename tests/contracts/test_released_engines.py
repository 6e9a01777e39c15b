# SPDX-License-Identifier: Apache-2.0
"""The contracts with rollout engines hold in releases that cannot be imported here, too: their sources are read.

Of vLLM, the first is what verl pins for accelerators, the last the newest whose requirements verl's bounds allow. No
release of SGLang is within those bounds; the first is the newest that this package accepts, and the last the next one.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest
from contract import problems_of, read_table
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from test_contracts import CHECKOUT, INSTALLED, names_taken
from upstream import Upstream
from verl_on_vllm import missing_imports

from recipe.async_engine.config.packages import SGLANG

# 0.32.0 requires transformers>=5.16.1, where verl 0.9.1 requires transformers<5.11.
PINNED, NEWEST = "0.24.0", "0.31.0"
# transformers is pinned by SGLang: 5.6.0, which verl excludes, then 5.8.1, and 5.19.0 in the newest, 0.5.23.
NEWEST_SGLANG, NEXT_SGLANG = "0.5.12.post1", "0.5.13"
CACHE = CHECKOUT / "build" / "engine-sources"
DOWNLOAD_S = 900


@pytest.fixture(scope="module", params=[PINNED, NEWEST])
def released(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Upstream]:
    """A release and its sources."""
    return request.param, sources("vllm", request.param, tmp_path_factory.mktemp("wheel"))


def sources(package: str, release: str, empty: Path) -> Upstream:
    """Return the sources of a release, downloaded once (up to 280 MB) and kept in `build/`."""
    folder = CACHE / f"{package}-{release}"
    if not folder.exists():
        unpack(download(package, release, empty), folder)
    return Upstream({**INSTALLED.roots, package: folder / package})


def download(package: str, release: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version=3.12", "--platform=manylinux_2_34_x86_64", "--platform=manylinux_2_28_x86_64"]
    command += [f"--dest={folder}", f"{package}=={release}"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_S, check=False)
    if finished.returncode != 0:
        pytest.skip(f"{package} {release} cannot be downloaded: {finished.stderr.strip().splitlines()[-1]}")
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, folder: Path) -> None:
    """Its Python sources, and nothing else; whole or not at all."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unfinished, [name for name in archive.namelist() if name.endswith(".py")])
    wheel.unlink()
    unfinished.rename(folder)


def test_pinned_release_is_what_verl_pins() -> None:
    pinned = [Requirement(line) for line in requires("verl") or () if line.startswith("vllm==")]
    assert [str(requirement.specifier) for requirement in pinned] == [f"=={PINNED}"]


@pytest.mark.slow
def test_contracts_are_kept_in(released: tuple[str, Upstream]) -> None:
    release, upstream = released
    contracts = [contract for contract in read_table("vllm") if contract.is_for(release)]
    assert [problem for contract in contracts for problem in problems_of(contract, upstream)] == []


@pytest.mark.slow
def test_contracts_with_sglang_are_kept_in_the_releases_that_are_accepted_and_no_longer(tmp_path: Path) -> None:
    def problems(release: str) -> list[str]:
        upstream = sources("sglang", release, tmp_path)
        return [problem for contract in read_table("sglang") for problem in problems_of(contract, upstream)]

    (pinned,) = [Requirement(line) for line in requires("verl") or () if line.startswith("sglang==")]
    assert f"sglang{pinned.specifier}" == SGLANG
    assert SpecifierSet(f"{pinned.specifier}.*").contains(NEWEST_SGLANG)
    assert problems(NEWEST_SGLANG) == []
    assert problems(NEXT_SGLANG) != [], "it could be accepted too"


@pytest.mark.slow
def test_no_name_of_the_worker_extension_is_taken_in(released: tuple[str, Upstream]) -> None:
    assert names_taken(released[1]) == []


@pytest.mark.slow
def test_what_verl_imports_is_in(released: tuple[str, Upstream]) -> None:
    assert missing_imports(released[1]) == []


def test_what_verl_imports_is_in_the_installed_vllm() -> None:
    assert missing_imports(INSTALLED) == []
