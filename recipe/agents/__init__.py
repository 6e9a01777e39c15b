# SPDX-License-Identifier: Apache-2.0
"""Trains any agent that talks to a model by OpenAI's interface, unchanged: docs/agents.md."""
