# SPDX-License-Identifier: Apache-2.0
"""The state machines: what may start, what may be trained, where time went. Plain Python, the clock passed in."""
