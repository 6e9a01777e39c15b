# SPDX-License-Identifier: Apache-2.0
"""Trains any agent that calls a model through OpenAI's API, without changes to the agent (docs/agents.md)."""
