"""Counter of the operators that a block of code calls, also in backward passes."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode


class CountCalls(TorchDispatchMode):
    """Counts calls of operators that are not views, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Counter[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.count[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))
