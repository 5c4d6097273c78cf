"""Comparison of two fits."""

import torch


def same(first, second, **tolerance):
    for part in ("params", "local_params"):
        for name, value in getattr(first, part).items():
            torch.testing.assert_close(value, getattr(second, part)[name], **tolerance)


EXACTLY = {"rtol": 0, "atol": 0}
