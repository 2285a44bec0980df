"""A pytest plugin that puts the extension named by POISE_TEST_NATIVE in the place of the installed one."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

_NAME = "poise.kernels.cpu._native"


def _install(path: str) -> None:
    loader = importlib.machinery.ExtensionFileLoader(_NAME, path)
    spec = importlib.util.spec_from_file_location(_NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[_NAME] = module


_install(os.environ["POISE_TEST_NATIVE"])
