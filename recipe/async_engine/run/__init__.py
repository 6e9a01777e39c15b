# SPDX-License-Identifier: Apache-2.0
"""The main process of a run: it starts and watches the run's processes, handles signals and writes the summary."""
