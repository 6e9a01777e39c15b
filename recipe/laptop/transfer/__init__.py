# SPDX-License-Identifier: Apache-2.0
"""The checkpoint engine `recipe_gloo`, which transfers weights through host memory."""
