"""The one exception that a command line turns into a single line."""


class UserError(Exception):
    """Something the user gave cannot be used: the message names it, says what it was and what is accepted.

    Command lines print it as one line and exit with its status; everything else is a fault of ours and keeps its
    traceback.
    """

    exit_status = 2
