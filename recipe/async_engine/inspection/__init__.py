# SPDX-License-Identifier: Apache-2.0
"""Looks at the files that a configuration names, and has the settings judged with what was found."""
