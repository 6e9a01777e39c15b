# SPDX-License-Identifier: Apache-2.0
"""Extensions of stock verl's v1 trainers: hard staleness bound, first-weights gate and log-prob servers."""
