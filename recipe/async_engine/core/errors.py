# SPDX-License-Identifier: Apache-2.0
"""Exceptions of the recipe, all below one base class.

A caller that wants to end a job with a clear message catches `RecipeError`; everything else is a defect and
propagates with its traceback. Messages name the thing (setting, group, state), its value, what is allowed, and
what to change.
"""


class RecipeError(Exception):
    """Base of every exception that the recipe raises on purpose."""


class CannotGoOn(RecipeError):
    """A part of the run died, is silent or is late; the message names it, the limit and the setting of that limit."""


class SettingError(RecipeError, ValueError):
    """A setting has a value that is not allowed."""

    def __init__(self, setting: str, value: object, allowed: str, advice: str = "") -> None:
        message = f"{setting} = {value!r} is not allowed: it must be {allowed}."
        super().__init__(f"{message} {advice}".rstrip())
        self.setting = setting
        self.value = value


class StalenessViolation(RecipeError):
    """The staleness invariant does not hold: some live group could only be trained past the bound."""


class GateError(RecipeError):
    """A call to the staleness gate is not permitted in its present state."""


class LedgerError(RecipeError):
    """A call to the sample ledger is not permitted in its present state."""


class LedgerIdentityError(LedgerError):
    """`issued = trained + filtered + failed + live` does not hold, or a prompt was trained twice."""


class SnapshotError(LedgerError):
    """A snapshot of the ledger cannot be restored under the present settings, or is not a snapshot."""


class CheckpointError(RecipeError):
    """A checkpoint, or a copy of the weights in it, cannot be used by this run, or was not written in time."""


class WrongInstallation(RecipeError):
    """A different package than the one required is installed, or comes first on Python's path; the message names it."""


class VersionRecordError(RecipeError):
    """Per-token policy versions are malformed, or do not cover the tokens they should."""


class GenerationError(RecipeError):
    """A request could not be answered."""


class RequestFailed(GenerationError):
    """An engine ended a request with a finish reason that is not known to mark a complete answer."""


class EngineDied(GenerationError):
    """The engine of a rollout server died; the server may live on and answer every request with this error."""


class NothingFree(RecipeError):
    """No node has the requested accelerators and CPUs free at the moment; a later attempt may succeed."""


class WeightStreamError(RecipeError):
    """A weight sync was cut off, timed out, or carried something other than what was expected."""


class WeightLoadError(RecipeError):
    """The engine that belongs to this weight worker did not load the weights."""
