# SPDX-License-Identifier: Apache-2.0
"""What joins stock verl's own v1 trainers: hard bound, first-weights gate and log-prob servers beside them."""
