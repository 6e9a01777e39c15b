# SPDX-License-Identifier: Apache-2.0
"""Plans memory and throughput of a run before its launch, without importing Ray, torch, vLLM or verl."""
