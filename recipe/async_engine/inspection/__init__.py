# SPDX-License-Identifier: Apache-2.0
"""Looks at the files that a configuration names, and has the settings' rules judge what was found.

It reads data and weights with pyarrow and safetensors; what starts a run, or a trainer of verl's, may import it.
"""
