"""Where the packed app begins."""

import os

from node_app.main import main


def keep_libraries_to_oneself() -> None:
    """On Linux, PyInstaller leads its program to the packed libraries; the browser that the app opens has its own."""
    os.environ.pop("LD_LIBRARY_PATH", None)
    if (before := os.environ.pop("LD_LIBRARY_PATH_ORIG", None)) is not None:
        os.environ["LD_LIBRARY_PATH"] = before


if __name__ == "__main__":
    keep_libraries_to_oneself()
    main()
