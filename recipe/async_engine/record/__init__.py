# SPDX-License-Identifier: Apache-2.0
"""A run's folder: written so that a crash leaves the old or the new file, and owned by one run at a time."""
