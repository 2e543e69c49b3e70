"""`python -m shardwise.demo`: the command `shardwise demo`."""

import sys

from shardwise.cli import main

if __name__ == "__main__":
    sys.exit(main(["demo", *sys.argv[1:]]))
