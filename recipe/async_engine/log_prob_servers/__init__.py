# SPDX-License-Identifier: Apache-2.0
"""Log-prob servers: forward-only replicas of the training engine, on their own accelerators, that compute log-probs."""
