# SPDX-License-Identifier: Apache-2.0
"""Brings a prompt to a finished trajectory: scheduler, agent-loop workers, and the client that resumes answers."""
