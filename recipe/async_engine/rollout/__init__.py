# SPDX-License-Identifier: Apache-2.0
"""Turns prompts into trajectories: the scheduler, the agent-loop workers, and the client that resumes answers."""
