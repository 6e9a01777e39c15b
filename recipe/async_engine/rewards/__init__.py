# SPDX-License-Identifier: Apache-2.0
"""Reward workers, their process pool, and the transport of answers to them."""
