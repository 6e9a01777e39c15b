# SPDX-License-Identifier: Apache-2.0
"""The rules of a configuration, by subject. A rule yields a problem for each setting that has to be changed."""
