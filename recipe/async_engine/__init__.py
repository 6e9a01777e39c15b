# SPDX-License-Identifier: Apache-2.0
"""The engine that the asynchronous modes share. Importing it imports nothing heavy.

Its rooms, from the roof to the ground. A room may import those on lower floors; `make lint` holds that.

    flags                      the modes as trainers of stock verl's main
    run, verl_v1               a run of this package's mains; parts beside verl's own v1 trainers
    trainer, task, inspection  the training loop; the built-in task; what a configuration refers to
    logprobs                   sources of proximal log-probs
    rollout                    prompts to trajectories: scheduler, agent-loop workers, client
    model_engine, rewards      log-prob servers; what scores answers
    replicas                   rollout servers
    weights                    trainer to replicas
    recovery                   what stopped is noticed, ended, replaced
    storage, prefork, platform files that last; forks; the CPU
    settings                   types, plan, rules (pure)
    core, modes                state machines (pure); which trainer a mode has
"""

__version__ = "0.1.0"
