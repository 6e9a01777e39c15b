# SPDX-License-Identifier: Apache-2.0
"""Estimates what a run needs of each accelerator and host, from its configuration and the models' config.json alone."""
