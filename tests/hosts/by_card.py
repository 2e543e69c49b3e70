"""Runs a module with the network card of this rank: `-m tests.hosts.by_card MODULE ARGUMENTS...`, under torchrun."""

import os
import runpy
import sys

if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = f"eth{int(os.environ['LOCAL_RANK']) % int(os.environ['CARDS'])}"
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
