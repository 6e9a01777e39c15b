# SPDX-License-Identifier: Apache-2.0
"""A fork server, which starts the processes of a local CPU run quickly.

It has imported torch, verl and a rollout engine, so its forks need not do that.
"""
