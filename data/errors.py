"""The room's one exception."""


class DataError(ValueError):
    """Input that cannot be used. The message is one line: what was wrong, and what is accepted.

    Command lines print it and exit non-zero; any other exception from this package is a fault of ours.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
