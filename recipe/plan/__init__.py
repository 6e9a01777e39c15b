# SPDX-License-Identifier: Apache-2.0
"""Plans a run before it starts, without importing Ray, torch, vLLM or verl."""
