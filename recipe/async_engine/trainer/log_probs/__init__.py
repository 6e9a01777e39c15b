# SPDX-License-Identifier: Apache-2.0
"""Where the proximal log-probs of a batch come from, the losses that go with it, and the mismatch that all report."""
