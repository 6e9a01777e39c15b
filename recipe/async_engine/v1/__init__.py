# SPDX-License-Identifier: Apache-2.0
"""Extends stock verl's v1 trainers.

The extensions are a hard staleness bound, log-prob servers, and no answers before the first complete weights.
"""
