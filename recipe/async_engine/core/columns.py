# SPDX-License-Identifier: Apache-2.0
"""Names of columns of training batches, and of fields of trajectories and prompts, of this package and of verl."""

TOKEN_VERSIONS = "token_versions"
"""Batch column, int64 (rows, R): the policy version of each response token, -1 for tokens that no policy sampled."""

SCORED_BY = "old_log_prob_versions"
"""Batch column, int64 (rows, R): the version that computed each token's ``old_log_probs``, -1 if not computed."""

OLD_LOG_PROBS, ENTROPY = "old_log_probs", "entropy"
"""verl's batch columns with the proximal log-probs, and with the entropies that were computed together with them."""

VERSION_RUNS = "version_runs"
"""Extra field of a trajectory: the policy versions of its response's tokens as run-length code [(version, count), ...].
"""

SCORES = "proximal_scores"
"""Extra field of a trajectory: its proximal log-probs (`ResponseScores`); absent if any sampled token has none."""

REFERENCE = "reference_log_probs"
"""Extra field of a trajectory: the reference policy's log-probs of the response, float32 (R,); absent if not computed.
"""

REPORTED = "reward_extra_info"
"""verl's extra field of a trajectory: the values that the reward function returned in addition to the score."""

OUTPUT_KEYS = "output_key"
"""Batch column: uid of the group, number of the trajectory and number of the output, as text with "_" between, like the
keys of verl's v1 trainers. Absent if each trajectory of the batch has one output.
"""

DATASET_INDEX = "dataset_index"
"""Field of a prompt: the index of its row in the data set."""

FAILURE = "recipe_data_failure"
"""The only field of a prompt whose data row could not be read; its value is the text of the error."""

UNMATCHED_SHARE = "agent_unmatched_share"
"""Extra field of an agent's trajectory: of the answers that the agent sent back in later requests, the share that does
not match the sampled tokens, and was therefore treated as context.
"""

ARGUMENTS = frozenset({"sampling_params", "self"})
"""Names that no field of a data row may have, because verl calls each agent loop's ``run`` with the row's fields and
with its own arguments of these names.
"""

OTHER_NAME = "reported_"
"""Prefix that is added to a name in the output of a user's reward or agent loop if the name is in `TAKEN`."""

TAKEN = frozenset(
    {
        *(TOKEN_VERSIONS, SCORED_BY, OLD_LOG_PROBS, ENTROPY, VERSION_RUNS, SCORES, REFERENCE, DATASET_INDEX),
        OUTPUT_KEYS,
        *("exact_versions", "uid", "data_source", "reward_model", "extra_info", "dummy_tensor"),
        *("prompts", "responses", "response_mask", "loss_mask", "input_ids", "attention_mask", "position_ids"),
        *("rollout_log_probs", "routed_experts", "teacher_ids", "teacher_logprobs", "rm_scores", "reward_baselines"),
        *("token_level_scores", "token_level_rewards", "ref_log_prob", "entropys", "values", "advantages", "returns"),
        *("rollout_is_weights", "sum_pi_squared", "multi_modal_inputs", "__num_turns__", "__do_sample__"),
    }
)
"""Batch columns that verl or this package reads or writes. A user's values may not replace them."""

OF_THE_BATCH = TAKEN - {DATASET_INDEX, "uid", "data_source", "reward_model", "extra_info"}
"""Columns of the training batch. If a data row has a field of such a name, only the agent loop and the reward function
get the field, because verl refuses a batch with duplicate names (verl/protocol.py:1115).
"""
