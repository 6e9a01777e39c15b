# SPDX-License-Identifier: Apache-2.0
"""Weight transfer through host memory: the checkpoint engine `recipe_gloo`."""
