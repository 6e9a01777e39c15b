# SPDX-License-Identifier: Apache-2.0
"""State machines that decide what may start, what may be trained, and where time went, in plain Python with the clock
passed in.
"""
