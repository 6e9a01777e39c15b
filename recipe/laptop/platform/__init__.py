# SPDX-License-Identifier: Apache-2.0
"""Support for the CPU as a platform of verl and vLLM."""
