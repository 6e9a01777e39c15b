# SPDX-License-Identifier: Apache-2.0
"""Emulated accelerators: work on a CPU takes as long as on a device, and the remaining time uses no core.

They are for benchmarks and tests only; nothing in the package imports them. docs/emulation.md describes their use.
"""
