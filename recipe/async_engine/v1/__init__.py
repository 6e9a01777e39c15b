# SPDX-License-Identifier: Apache-2.0
"""Extends stock verl's v1 trainers: hard staleness bound, log-prob servers, no answers before the first weights."""
