# SPDX-License-Identifier: Apache-2.0
"""Pure state machines that decide what may start and what may be trained, in plain Python with the clock passed in."""
