# SPDX-License-Identifier: Apache-2.0
"""Estimates the memory that a run needs, from only its configuration and the models' config.json."""
