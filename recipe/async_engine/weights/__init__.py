# SPDX-License-Identifier: Apache-2.0
"""How a weights version gets from the trainer to all replicas: sending, staging, checking and swapping."""
