"""Where the packed app begins."""

from node_app.main import main

if __name__ == "__main__":
    main()
