# SPDX-License-Identifier: Apache-2.0
"""The state machines: which group may start, which may be trained, in which state it is, and where time went.

Plain Python without Ray, torch, vLLM or verl, the clock passed in. It imports nothing of the rooms above;
everyone may import it.
"""
