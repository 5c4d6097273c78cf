"""A mode that sees each ATen operation, without importing torch's compiler."""

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """Handle each ATen operation in a block, in ``__torch_dispatch__`` of a subclass."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: else torch imports its compiler at the first operation, which takes seconds.

        Excluding the code of a mode from it takes as long as an operation.
        """
        return False
