# SPDX-License-Identifier: Apache-2.0
"""How a version gets from the trainer to every replica: sent, loaded beside the engine, checked, announced."""
