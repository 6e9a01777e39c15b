# SPDX-License-Identifier: Apache-2.0
"""The rules that a configuration must meet, by subject. A rule yields a problem for each setting to be changed."""
