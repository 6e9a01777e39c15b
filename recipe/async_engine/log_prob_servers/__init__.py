# SPDX-License-Identifier: Apache-2.0
"""Log-prob servers: replicas of the training engine that only compute log-probs, on resources of their own."""
