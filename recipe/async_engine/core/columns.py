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

FAILURE = "recipe_data_failure"
"""Of a prompt's fields, alone: why its row could not be had from the data set, in the words of whatever failed."""

ARGUMENTS = frozenset({"sampling_params", "self"})
"""What verl calls each agent loop's ``run`` with, beside a row's fields by name: no row can have fields of these names.

``priority``, which verl's own loops have too, is a row's to set.
"""

OTHER_NAME = "reported_"
"""Goes before a name that a user's reward or agent loop gave something and that is taken."""

TAKEN = frozenset(
    {
        *(TOKEN_VERSIONS, SCORED_BY, OLD_LOG_PROBS, ENTROPY, VERSION_RUNS, SCORES, REFERENCE, DATASET_INDEX),
        *("exact_versions", "uid", "data_source", "reward_model", "extra_info", "dummy_tensor"),
        *("prompts", "responses", "response_mask", "loss_mask", "input_ids", "attention_mask", "position_ids"),
        *("rollout_log_probs", "routed_experts", "teacher_ids", "teacher_logprobs", "rm_scores", "reward_baselines"),
        *("token_level_scores", "token_level_rewards", "ref_log_prob", "entropys", "values", "advantages", "returns"),
        *("rollout_is_weights", "sum_pi_squared", "multi_modal_inputs", "__num_turns__", "__do_sample__"),
    }
)
"""Columns of a batch that verl or this package make or read: nothing of a user's takes their place."""

OF_THE_BATCH = TAKEN - {DATASET_INDEX, "uid", "data_source", "reward_model", "extra_info"}
"""What a training batch has of its own. A row's field of such a name is the agent loop's and the reward's alone: verl
refuses a batch that has a name twice (verl/protocol.py:1115)."""
