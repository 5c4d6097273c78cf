"""Fits, and what follows them, on a device that is as strict as a GPU and needs none: on_pretend_gpu.py."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_in_a_process_of_its_own(which):
    """At the first gradient of a process PyTorch counts the kinds of devices that there are."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which]
    done = subprocess.run(
        [*command, str(HERE / "on_pretend_gpu.py")], cwd=HERE.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2000:]
