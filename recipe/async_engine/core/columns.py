# SPDX-License-Identifier: Apache-2.0
"""Names of what this package adds to verl's batches and trajectories, and those of verl's own that rooms share."""

TOKEN_VERSIONS = "token_versions"
"""Of a batch, int64 (rows, R): the policy version of each token of the response, -1 where no policy sampled it."""

SCORED_BY = "old_log_prob_versions"
"""Of a batch, int64 (rows, R): the version that computed each token's ``old_log_probs``, -1 where none did."""

OLD_LOG_PROBS, ENTROPY = "old_log_probs", "entropy"
"""Of a batch, verl's: the proximal log-probs, and the entropies that came with them."""

VERSION_RUNS = "version_runs"
"""Of a trajectory's extra fields: [(policy version, token count), ...] over its response."""

SCORES = "proximal_scores"
"""Of a trajectory's extra fields: `ResponseScores`, absent where not all of it was scored."""

REFERENCE = "reference_log_probs"
"""Of a trajectory's extra fields: the reference policy's, float32 (R,) over the response, absent if not scored."""

REPORTED = "reward_extra_info"
"""Of a trajectory's extra fields, verl's: what the reward function gave beside the score."""

DATASET_INDEX = "dataset_index"
"""Of a prompt's fields: its row in the data set."""
