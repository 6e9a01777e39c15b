# SPDX-License-Identifier: Apache-2.0
"""The settings: their types, the plan derived from them, and the rules that refuse configurations that cannot run.

Like `recipe.async_engine.core`, this package is plain Python: it opens no data file and imports neither Ray, torch,
vLLM nor verl.
"""
