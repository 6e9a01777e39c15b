# SPDX-License-Identifier: Apache-2.0
"""What a configuration must fulfil, by subject: a rule yields a problem for each setting that cannot stay."""
