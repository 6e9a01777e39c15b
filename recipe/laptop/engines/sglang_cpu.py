# SPDX-License-Identifier: Apache-2.0
"""Lets SGLang be imported without an accelerator.

When SGLang starts, it imports its kernels (``sgl_kernel``) and an image decoder of torchvision, although on a CPU it
calls neither of them; both packages are published for accelerators only. In processes that import SGLang, the finder in
this module provides stand-ins for these imports. Calling anything from a stand-in raises an error that names what was
called.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any

PACKAGES = ("sgl_kernel", "torchvision")


class Absent(type):
    """Metaclass of the classes that are a stand-in's attributes. Such a class has every attribute; calling it fails."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{cls.__name__}.{name}", (), {})

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{cls.__name__} needs an accelerator")


class StandIn(ModuleType):
    """A stand-in for a package: it has every attribute, and calling an attribute raises an error."""

    __path__ = ()  # type: ignore[assignment]
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}", (), {})


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last entry of ``sys.meta_path``; it provides `PACKAGES` and their modules in processes that import SGLang."""

    def find_spec(self, fullname: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in PACKAGES or "sglang" not in sys.modules:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing, because a stand-in has no code."""


class ImportWatch(importlib.abc.MetaPathFinder):
    """An entry of ``sys.meta_path`` that finds no modules, but changes Transformers when SGLang is imported.

    If torchvision is absent when Transformers is imported, Transformers replaces ``AutoImageProcessor`` by a class that
    raises errors. This finder restores the real class, which works without torchvision and with which SGLang registers
    its image processors.
    """

    def find_spec(self, fullname: str, *_: Any) -> None:
        if fullname == "sglang.srt.configs.utils":
            import transformers
            from transformers.models.auto.image_processing_auto import AutoImageProcessor

            transformers.AutoImageProcessor = AutoImageProcessor


def install() -> None:
    """Provide stand-ins for modules that SGLang imports but cannot use on a CPU, and select SGLang's CPU engine.

    Calling this again does no harm.
    """
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    if not any(isinstance(finder, StandInFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, ImportWatch())
        sys.meta_path.append(StandInFinder())
