# SPDX-License-Identifier: Apache-2.0
"""Adapters with which verl runs on a CPU."""
