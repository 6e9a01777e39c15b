# SPDX-License-Identifier: Apache-2.0
"""The reward of programming tasks: runs the programs of answers where they can do no harm."""
