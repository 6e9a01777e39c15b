# SPDX-License-Identifier: Apache-2.0
"""Planning a run before it starts. Pure Python: imports no Ray, torch, vLLM or verl."""
