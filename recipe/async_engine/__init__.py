# SPDX-License-Identifier: Apache-2.0
"""The engine that the asynchronous modes share. Importing it imports nothing heavy."""

__version__ = "0.1.0"
