# SPDX-License-Identifier: Apache-2.0
"""The report of a run: ``python -m recipe.report RUN``. It reads a run's folder and imports no engine."""
