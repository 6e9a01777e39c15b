# SPDX-License-Identifier: Apache-2.0
"""Transfer of weights from the trainer to all replicas: sending, staging, checking and swapping a version."""
