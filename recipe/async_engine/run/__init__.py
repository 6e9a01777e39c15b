# SPDX-License-Identifier: Apache-2.0
"""A run from its main's first moment to its last: processes, signals, signs of life, and its record."""
