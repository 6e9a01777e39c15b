# SPDX-License-Identifier: Apache-2.0
"""The training loop of a run and its stages."""
