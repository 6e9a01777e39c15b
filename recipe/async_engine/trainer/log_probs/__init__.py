# SPDX-License-Identifier: Apache-2.0
"""The sources of a batch's proximal log-probs, and the policy losses that two of these sources need."""
