# SPDX-License-Identifier: Apache-2.0
"""Inspects the files and nodes that a configuration refers to, and validates the configuration with the findings."""
