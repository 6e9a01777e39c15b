# SPDX-License-Identifier: Apache-2.0
"""What this package brings to the v1 trainers of stock verl."""
