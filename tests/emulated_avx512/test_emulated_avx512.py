"""The AVX-512 variant on a CPU without AVX-512: built against SIMDe, then put through every test of bits.

Needs a C++ compiler, CMake, nanobind and SIMDe's headers (Debian: libsimde-dev). Where the tests themselves run under
AddressSanitizer (preloaded), the extension is built with it and with UndefinedBehaviorSanitizer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest

from poise.kernels.cpu import available_isas

HERE = Path(__file__).parent
TESTS = HERE.parent
TESTS_OF_BITS = [
    "unit/kernels/test_native_linear.py",
    "unit/kernels/test_native_attention.py",
    "unit/sampling",
    "unit/executor",
]
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")
# Whole models in hundreds of companies take half an hour under sanitizers, on code that the other tests go through as well.
UNSANITIZED = TESTS / "unit/executor/test_executor_invariance.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif("avx512" in available_isas(), reason="the real variant is tested here"),
    pytest.mark.skipif(which("cmake") is None, reason="needs CMake"),
    pytest.mark.skipif(
        not Path("/usr/include/simde/x86/avx512.h").exists(), reason="needs SIMDe's headers"
    ),
]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory) -> Path:
    """The built extension."""
    nanobind = pytest.importorskip("nanobind")
    build = tmp_path_factory.mktemp("emulated")
    settings = [f"-Dnanobind_DIR={nanobind.cmake_dir()}", f"-DPython_EXECUTABLE={sys.executable}"]
    settings += ["-DPOISE_SANITIZE=ON"] if SANITIZED else []
    run("cmake", "-S", HERE, "-B", build, *settings, LD_PRELOAD="")
    run("cmake", "--build", build, "--parallel", "2", LD_PRELOAD="")
    (extension,) = build.glob("_native*.so")
    return extension


def run(*command: str | Path, **variables: str) -> str:
    process = subprocess.run(
        [str(part) for part in command],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.returncode == 0, process.stdout[-10_000:]
    return process.stdout


def test_every_test_of_bits(emulated):
    report = run(
        sys.executable, "-m", "pytest", "-p", "emulated_native", "-p", "no:cacheprovider",
        "-m", "slow or not slow", "-k", "not baseline", "-q", *(TESTS / name for name in TESTS_OF_BITS),
        *(["--ignore", UNSANITIZED] if SANITIZED else []),
        POISE_TEST_NATIVE=str(emulated),
        POISE_ISA="avx512",
        PYTHONPATH=os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
    )  # fmt: skip
    assert " passed" in report
