# SPDX-License-Identifier: Apache-2.0
"""Adapters with which verl and vLLM run on a CPU."""
