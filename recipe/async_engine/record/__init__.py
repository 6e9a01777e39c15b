# SPDX-License-Identifier: Apache-2.0
"""Files in a run's folder: a crash leaves either the old or the new content, and one run owns the folder."""
