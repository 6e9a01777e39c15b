# SPDX-License-Identifier: Apache-2.0
"""The settings: their types, the plan derived from them, and the rules that refuse what cannot run.

It is plain Python like the core: it opens no data file and imports neither Ray, torch, vLLM nor verl.
"""
