# SPDX-License-Identifier: Apache-2.0
"""State machines in plain Python, without Ray, torch or a clock, that decide what may start and what may be trained."""
