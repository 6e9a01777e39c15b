# SPDX-License-Identifier: Apache-2.0
"""Exceptions of the package, with one base class.

A caller that wants to end a job with a clear message catches `RecipeError`; everything else is a defect and propagates
with its traceback. A message names what is wrong (setting, group, state), its value, what is allowed and how to fix it.
"""


class RecipeError(Exception):
    """Base class of every exception that this package raises on purpose."""


class CannotGoOn(RecipeError):
    """A component of the run died, does not answer or is late; the message names the component."""


class SettingError(RecipeError, ValueError):
    """A setting has a value that is not allowed."""

    def __init__(self, setting: str, value: object, allowed: str, advice: str = "") -> None:
        message = f"{setting} = {value!r} is not allowed: it must be {allowed}."
        super().__init__(f"{message} {advice}".rstrip())
        self.setting = setting
        self.value = value


class StalenessViolation(RecipeError):
    """A prompt group can no longer be trained within the staleness bound."""


class GateError(RecipeError):
    """The staleness gate was asked for something that it does not allow now, such as to start one group too many."""


class LedgerError(RecipeError):
    """The sample ledger was asked for something that it does not allow, such as to issue a prompt twice."""


class LedgerIdentityError(LedgerError):
    """The ledger's counts break `issued = trained + filtered + failed + live`, or a prompt was trained twice."""


class SnapshotError(LedgerError):
    """A snapshot of the ledger is malformed, or cannot be restored under the present settings."""


class CheckpointError(RecipeError):
    """A checkpoint, or a copy of the published weights, is unusable for this run or was not written in time."""


class WrongInstallation(RecipeError):
    """A package other than the required one is installed, or comes first on Python's path.

    The message names that package.
    """


class VersionRecordError(RecipeError):
    """The policy versions of an answer's tokens are malformed, or are missing for some tokens."""


class GenerationError(RecipeError):
    """A request to a rollout server could not be answered."""


class RequestFailed(GenerationError):
    """An engine ended a request with a finish reason other than those of a complete answer."""


class EngineDied(GenerationError):
    """The engine of a rollout server died. The server may keep running and answer every request with this error."""


class NothingFree(RecipeError):
    """No node has the requested accelerators and CPUs free now. A later attempt may succeed."""


class WeightStreamError(RecipeError):
    """A weight sync was interrupted, timed out, or carried unexpected data."""


class WeightLoadError(RecipeError):
    """Weights could not be loaded into a rollout engine."""
