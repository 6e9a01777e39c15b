# SPDX-License-Identifier: Apache-2.0
"""Detects that an actor or a process of a run has died or hangs, ends it completely, and starts a replacement."""
