# SPDX-License-Identifier: Apache-2.0
"""The settings: types, the plan derived from them, and the rules that refuse what cannot run. Pure, as the core."""
