# SPDX-License-Identifier: Apache-2.0
"""Extensions of stock verl's v1 trainers: a hard staleness bound, a first-weights gate and log-prob servers."""
