# SPDX-License-Identifier: Apache-2.0
"""SGLang as a rollout engine."""
