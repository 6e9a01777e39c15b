# SPDX-License-Identifier: Apache-2.0
"""Composes runs: the modes' own mains, and the modes as trainers of stock verl's main, chosen by a flag.

A flag is an argument such as ``verl.trainer.main_ppo +recipe=fully_async``. The engine imports neither this package nor
what is composed here.
"""
