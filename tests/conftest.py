import os
import signal

import pytest

# Small tensors only: a second thread costs more than it saves, in the processes that tests start too.
os.environ["OMP_NUM_THREADS"] = "1"

import torch


def pytest_configure(config):
    """Let tests send interrupts where pytest was started in the background, which ignores them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
