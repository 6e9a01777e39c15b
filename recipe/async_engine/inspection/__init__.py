# SPDX-License-Identifier: Apache-2.0
"""Finds out about the files and nodes that a configuration names, and judges the configuration with that."""
