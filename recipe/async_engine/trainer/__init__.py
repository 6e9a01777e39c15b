# SPDX-License-Identifier: Apache-2.0
"""The loop around verl's own stages, one batch after another, and its checkpoints."""
