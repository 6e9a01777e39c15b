# SPDX-License-Identifier: Apache-2.0
"""The report of a run: ``python -m recipe.report RUN`` reads a run's folder, without importing any engine."""
