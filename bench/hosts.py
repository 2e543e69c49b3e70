"""Routes over two hosts of four ranks, planned with the links of hosts and with equal links: time, bytes between hosts.

Hosts are network namespaces of this machine. Links between hosts are ten times slower than a rank's inside: each rank
has a network card of its own (100 Mbit/s), or the four ranks of a host share one. Both routes run in turns; the
ratio is of medians. Needs root, `ip` and `tc`. `python -m bench.hosts`.
"""

import json

from bench.figures import figure
from tests.hosts.network_hosts import Hosts, why_not

ROUNDS = 7
SIDE = "1024"  # rows and columns of float32: 4 MiB


def main() -> None:
    if reason := why_not():
        print(f"not measured: {reason}")
        return
    for cards, inside, name in ((4, "4gbit", "a card for each rank"), (1, "4gbit", "one card a host")):
        with Hosts(2, rate="100mbit", inside=inside, cards=cards) as hosts:
            program = ("-m", "tests.hosts.by_card", "tests.hosts.topology_program", SIDE, SIDE, str(ROUNDS))
            ended = hosts.torchrun(*program, ranks=4, timeout=900)
        assert all(status == 0 for status, _ in ended), ended
        for line in ended[0].text.splitlines():
            if not line.startswith("{"):
                continue
            row = json.loads(line)
            flat, planned = row["flat"], row["hosts"]
            ratio, sent = planned["seconds"] / flat["seconds"], planned["bytes"] / flat["bytes"]
            what = f"{row['collective']} on {row['mesh']}, {name}"
            print(
                f"{what}: {flat['seconds'] * 1e3:.0f} ms flat, {planned['seconds'] * 1e3:.0f} ms by hosts, "
                f"ratio {ratio:.2f}; bytes between hosts {sent:.2f}"
            )
            print("  ", figure(f"{what}: by hosts to flat", ratio, 0.6))


if __name__ == "__main__":
    main()
