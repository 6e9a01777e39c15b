# SPDX-License-Identifier: Apache-2.0
"""Weights through host memory: the checkpoint engine `recipe_gloo`."""
