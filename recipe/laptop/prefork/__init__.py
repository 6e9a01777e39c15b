# SPDX-License-Identifier: Apache-2.0
"""A fork server that starts the processes of a local CPU run quickly, as it has imported torch, verl and an engine."""
