# SPDX-License-Identifier: Apache-2.0
"""Emulated accelerators: work on a CPU takes as long as a device would, and the rest of that time no core.

For benchmarks and tests only; nothing of the package imports it. docs/emulation.md has its use.
"""
