"""What a machine of Ascend cards knows of itself: which server of a rank table it is, and its cards' addresses."""

import re
from collections.abc import Collection
from pathlib import Path

from manyhands.cluster.descriptions.hccl_table import RankTable, is_address
from manyhands.cluster.descriptions.located_json import at_line
from manyhands.core.errors import UserError

HCCN = Path("/etc/hccn.conf")


def find_server(table: RankTable, names: Collection[str], where: str) -> int:
    """Which server of a checked table, by rank, has these addresses or name. Raises UserError: none, or several."""
    servers = table.by_rank
    if len(servers) == 1:
        return 0
    own = {name for name in names if not (is_address(name) and name.startswith(("127.", "::1")))}
    found = [index for index, server in enumerate(servers) if server.names & own]
    if len(found) == 1:
        return found[0]
    listed = "; ".join(f"server {index}: {', '.join(sorted(server.names))}" for index, server in enumerate(servers[:8]))
    what = "matches several servers of" if found else "is none of the servers in"
    raise UserError(
        f"this machine {what} the rank table",
        where,
        (
            f"this machine: {', '.join(sorted(own)) or 'no address but loopback'}",
            f"the table: {listed}",
            "add this machine's address as host_ip of its server, or start each process with RANK_ID",
        ),
    )


def read_hccn(path: Path = HCCN) -> dict[int, str]:
    """Cards' addresses from lines such as address_0=192.168.100.101, if the file is there. Raises UserError."""
    if not path.exists():
        return {}
    found: dict[int, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        matched = re.fullmatch(r"\s*address_(\d+)\s*=\s*(\S*)\s*", line)
        if matched and not is_address(matched[2]):
            what = f'address_{matched[1]} is "{matched[2]}"; expected an IP address'
            raise UserError(what, at_line(str(path), number), ("set it with hccn_tool, or correct the file",))
        if matched:
            found[int(matched[1])] = matched[2]
    return found
