# SPDX-License-Identifier: Apache-2.0
"""Reward workers, which compute rewards in a pool of processes, and the transport of answers to these workers."""
