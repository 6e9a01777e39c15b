# SPDX-License-Identifier: Apache-2.0
"""Files in a run's folder: a crash during a write leaves either the old or the new file, and one run owns the
folder.
"""
