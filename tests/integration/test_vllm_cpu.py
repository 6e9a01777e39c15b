# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU build takes new weights through this package's worker extension, and computes what stock vLLM would.

vLLM picks its platform at import, so everything runs in one fresh interpreter and reports what it saw.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipe.async_engine import features

CHECKOUT = Path(__file__).parents[2]

CODE = """
import json, torch, verl, vllm
import vllm.model_executor.layers.utils as layers
from vllm.model_executor.utils import set_weight_attrs

def linear(seed):
    torch.manual_seed(seed)
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.randn(64, 32), requires_grad=False)
    set_weight_attrs(layer.weight, {"weight_loader": lambda parameter, loaded: parameter.data.copy_(loaded)})
    return layer

x = torch.randn(5, 32)
stock = linear(2)
layers.dispatch_cpu_unquantized_gemm(stock, remove_weight=True)
report = {
    "vllm": vllm.__version__,
    "stock_weight_is_gone": stock.weight.numel() == 0 and not hasattr(stock.weight, "weight_loader"),
}
expected = stock.cpu_linear(x, None, None)

from recipe.laptop.engines import vllm_cpu
vllm_cpu.keep_loadable_weights()
vllm_cpu.keep_loadable_weights()
kept = linear(1)
layers.dispatch_cpu_unquantized_gemm(kept, remove_weight=True)
before = kept.cpu_linear(x, None, None)
kept.weight.weight_loader(kept.weight, linear(2).weight.data)
layers.dispatch_cpu_unquantized_gemm(kept, remove_weight=True)
after = kept.cpu_linear(x, None, None)
report["new_weights_are_used"] = not torch.equal(before, after)
report["bits_equal_stock"] = torch.equal(after, expected)

vllm_cpu.vllm.__version__ = "0.99.0"
try:
    vllm_cpu.keep_loadable_weights()
except Exception as error:
    report["other_release"] = f"{type(error).__name__}: {error}"
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {
        "PYTHONPATH": path,
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": features.MODULE_NAME,
        "OMP_NUM_THREADS": "1",
    }
    finished = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


def test_upstream_still_drops_the_weight_after_packing_it(seen: dict[str, Any]) -> None:
    assert seen["stock_weight_is_gone"], f"vLLM {seen['vllm']} keeps loadable weights: keep_loadable_weights can go"


def test_reloaded_layer_computes_the_bits_of_a_stock_layer(seen: dict[str, Any]) -> None:
    assert seen["new_weights_are_used"]
    assert seen["bits_equal_stock"]


def test_other_vllm_releases_are_refused(seen: dict[str, Any]) -> None:
    assert "WrongInstallation" in seen["other_release"] and "0.28.*" in seen["other_release"]
