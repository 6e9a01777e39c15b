# SPDX-License-Identifier: Apache-2.0
"""A fork server that has imported torch, verl and an engine, and so starts the processes of a local CPU run quickly."""
