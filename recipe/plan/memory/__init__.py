# SPDX-License-Identifier: Apache-2.0
"""Estimates the memory that a run needs, from its configuration and the models' config.json alone."""
