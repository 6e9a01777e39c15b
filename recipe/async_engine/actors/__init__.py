# SPDX-License-Identifier: Apache-2.0
"""Notices that a part of a run has stopped, ends what is left of it, and starts another one in its place."""
