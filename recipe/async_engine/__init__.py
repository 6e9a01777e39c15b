# SPDX-License-Identifier: Apache-2.0
"""The code that all asynchronous modes share. Importing this package imports no other module.

The table lists the packages in layers. A package may import those in the rows below its own; `make lint` checks that.

    run, v1                    launching a run of this package; additions to verl's own v1 trainers
    trainer, inspection        the training loop and its sources of proximal log-probs; checks of files and nodes
    rollout                    generation of trajectories: scheduler, agent-loop workers, client
    log_prob_servers, rewards  log-prob servers; reward workers
    engines                    rollout servers, and a folder for each rollout engine
    weights                    transfer of weights from the trainer to the replicas
    actors                     detection, termination and replacement of dead or hanging actors
    record                     files of a run: its events and the contents of its checkpoints
    config                     types of the settings, run plan and rules (all without I/O); Hydra's groups
    core, outside              state machines (without I/O); names of code in packages outside this one

This package does not import `recipe.laptop`, `recipe.programs`, `recipe.report` or `recipe.plan`. `recipe.mains`
imports both this package and those.
"""

__version__ = "0.1.0"
