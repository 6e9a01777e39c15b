# SPDX-License-Identifier: Apache-2.0
"""Extensions of stock verl's v1 trainers: a hard staleness bound, a gate for the first weights, log-prob servers."""
