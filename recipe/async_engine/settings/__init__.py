# SPDX-License-Identifier: Apache-2.0
"""The settings: their types, the plan derived from them, and the rules that refuse what cannot run.

Pure: plain mappings in, values and problems out; it imports the core alone, and every other room may import it.
"""
