# SPDX-License-Identifier: Apache-2.0
"""The CPU as a platform of verl and of vLLM."""
