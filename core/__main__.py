"""The command `core`, which is `python -m core` too."""

import signal


def main() -> None:
    """Until a command says otherwise Ctrl-C just ends the process: raised amid imports it is lost, or breaks them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from core import cli

    cli.main()


if __name__ == "__main__":
    main()
