# SPDX-License-Identifier: Apache-2.0
"""What joins stock verl's v1 trainers. Here are the columns that its trainers and agent loops share.

verl's v1 imports the trainers (see `recipe.async_engine.flags.register`), and the agent loops import verl's v1: neither
can import from the other.
"""

OLD_LOG_PROBS = "old_log_probs"
ENTROPY = "entropy"
